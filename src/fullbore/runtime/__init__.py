"""One executor that runs any schedule on torch.distributed."""

from fullbore.runtime.paced import PacedStage, paced_loss, wake_on_time
from fullbore.runtime.pipeline import Pipeline, StepResult

__all__ = ["PacedStage", "Pipeline", "StepResult", "paced_loss", "wake_on_time"]
