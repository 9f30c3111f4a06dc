"""One executor that runs any schedule on torch.distributed."""

from fullbore.runtime.loss import lost_rank
from fullbore.runtime.main_grad import gradient_of, set_gradient
from fullbore.runtime.paced import PacedStage, paced_loss, wake_on_time
from fullbore.runtime.pipeline import Pipeline
from fullbore.runtime.postvalidated import Kept, PostValidatedOptimizer, Undoable, Validated
from fullbore.runtime.result import StepResult
from fullbore.runtime.split import SplitReport
from fullbore.runtime.witness import DIED

__all__ = [
    "DIED",
    "Kept",
    "PacedStage",
    "Pipeline",
    "PostValidatedOptimizer",
    "SplitReport",
    "StepResult",
    "Undoable",
    "Validated",
    "gradient_of",
    "lost_rank",
    "paced_loss",
    "set_gradient",
    "wake_on_time",
]
