"""Training causal language models through a pipeline: models, text, optimizer, checkpoints, loop.

Importing this package imports no torch: settings are checked before anything heavy is loaded.
"""

from fullbore.train.settings import TrainSettings

__all__ = ["TrainSettings"]
