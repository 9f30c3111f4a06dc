"""One executor that runs any schedule on torch.distributed."""

from fullbore.runtime.main_grad import gradient_of, set_gradient
from fullbore.runtime.paced import PacedStage, paced_loss, wake_on_time
from fullbore.runtime.pipeline import Pipeline
from fullbore.runtime.result import StepResult
from fullbore.runtime.split import SplitReport

__all__ = [
    "PacedStage",
    "Pipeline",
    "SplitReport",
    "StepResult",
    "gradient_of",
    "paced_loss",
    "set_gradient",
    "wake_on_time",
]
