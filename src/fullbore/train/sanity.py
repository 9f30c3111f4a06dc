"""Whether a step's loss and gradient are numbers: if not, the run ends before they spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fullbore.errors import PipelineError
from fullbore.runtime import Pipeline
from fullbore.train.team import Team

__all__ = ["check_loss", "check_norm"]

_UNHARMED = ": the weights are still those of the step before; lower --lr, or look at the data"


def check_loss(
    loss: float | None,
    losses: Sequence[Tensor],
    *,
    step: int,
    last_stage: int,
    pipe: Pipeline,
    team: Team,
) -> float:
    """The loss of a step, if it is one; every rank calls.

    losses: of the microbatches, where the last stage is on this rank. Raises RankError with the
    rank and the microbatches in which the loss is no number.
    """
    if loss is not None and math.isfinite(loss):
        return loss
    mine = [m for m, one in enumerate(losses) if not math.isfinite(float(one))]
    told = enumerate(team.gather(mine))
    rank, bad = next(((rank, found) for rank, found in told if found), (None, []))
    where = f" (microbatches {', '.join(map(str, bad))})" if bad else ""
    raise pipe.fail(
        step=step,
        rank=rank,
        action=f"{last_stage}F{bad[0]}" if bad else None,
        cause=f"the loss of step {step} is {loss}{where}{_UNHARMED}",
    )


def check_norm(norm: float, *, step: int) -> None:
    """Raises PipelineError where the norm of a step's gradient, the same everywhere, is none."""
    if not math.isfinite(norm):
        raise PipelineError(f"the gradient's norm of step {step} is {norm}{_UNHARMED}")
