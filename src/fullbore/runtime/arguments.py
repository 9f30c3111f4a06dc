"""What a pipeline's arguments must be, judged by each rank and then by all of them together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullbore.errors import FullboreError, PipelineError
from fullbore.ir import Schedule
from fullbore.runtime.meeting import Said
from fullbore.runtime.tied import find_copies
from fullbore.verify import check

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one rank says of its arguments, and its own error if they are wrong."""

    said: Said
    error: FullboreError | None
    alone: bool

    def raise_together(self, objections: Sequence[str]) -> None:
        """Raise what any rank objects to, each with the class of its own error."""
        if not objections:
            return
        if self.error is not None and self.alone:
            raise self.error
        kind = PipelineError if self.error is None else type(self.error)
        raise kind("; ".join(objections))


def judge(
    *,
    stages: Mapping[int, nn.Module],
    schedule: Schedule,
    rank: int,
    ranks: int,
    has_loss: bool,
    tied: Sequence[Mapping[int, str]],
    reduction: str,
    overlap: bool,
    common: Mapping[str, Any],
) -> Judgement:
    """What this rank says of its arguments.

    common: further arguments that must be the same on all ranks, by the words that name them.
    """
    shared = {
        "schedules": hashlib.sha256(str(schedule).encode()).hexdigest(),
        "values of reduction": reduction,
        "tied weights": str([sorted(names.items()) for names in tied]),
        "values of overlap_p2p": str(overlap),
        **{name: str(value) for name, value in common.items()},
    }
    error: FullboreError | None = None
    try:
        if reduction not in ("mean", "sum"):
            raise PipelineError(f'reduction is "mean" or "sum", not {reduction!r}')
        check(schedule, blocking_sends=not overlap)
        _check_size(schedule, ranks)
        _check_stages(stages, schedule, rank, has_loss=has_loss)
        _check_tied(tied, stages, schedule)
    except FullboreError as found:
        error = found
    said = Said(objection=None if error is None else str(error), common=shared)
    return Judgement(said=said, error=error, alone=ranks == 1)


def _check_size(schedule: Schedule, ranks: int) -> None:
    if ranks != schedule.ranks:
        raise PipelineError(
            f"the schedule has {schedule.ranks} ranks, but the process group {ranks}: "
            f"start {schedule.ranks} processes, or make a schedule for {ranks} ranks"
        )


def _check_stages(
    stages: Mapping[int, nn.Module], schedule: Schedule, rank: int, *, has_loss: bool
) -> None:
    placed = schedule.placement.stages_of(rank)
    given = tuple(sorted(stages))
    if given != placed:
        raise PipelineError(
            f"the schedule places stages {list(placed)} here, but modules were given for "
            f"{list(given)}"
        )
    if schedule.stages - 1 in stages and not has_loss:
        raise PipelineError("the last stage is here, but loss_fn is missing")


def _check_tied(
    tied: Sequence[Mapping[int, str]], stages: Mapping[int, nn.Module], schedule: Schedule
) -> None:
    for names in tied:
        if not set(names) <= set(range(schedule.stages)):
            raise PipelineError(f"tied names a stage outside 0..{schedule.stages - 1}: {names}")
        find_copies(names, stages)
