"""One executor that runs any schedule on torch.distributed."""

from fullbore.runtime.loss import lost_rank
from fullbore.runtime.paced import PacedStage, paced_loss
from fullbore.runtime.pipeline import Pipeline, StepResult
from fullbore.runtime.witness import DIED

__all__ = ["DIED", "PacedStage", "Pipeline", "StepResult", "lost_rank", "paced_loss"]
