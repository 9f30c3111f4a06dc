"""Recomputation: an R ahead of every backward.

    rank 0  0F0 0F1 0B0 0B1     ->    rank 0  0F0 0F1 0R0 0B0 0R1 0B1        (ahead 0)

An R waits for no message. So even right before its backward it fills the time in which a rank waits
for the gradient, since a receive is put between the two.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fullbore.errors import ScheduleError
from fullbore.ir import Kind, Program, Schedule
from fullbore.passes.chosen import chosen_stages
from fullbore.passes.communication import strip_communication

__all__ = ["recompute_ahead"]


def recompute_ahead(
    schedule: Schedule, *, stages: Collection[int] | None = None, ahead: int = 0
) -> Schedule:
    """The same schedule with an R before each B and I; compute actions only. Linear in actions.

    stages: whose activations are made again, all if not given.
    ahead: how many actions of its rank stand between R and the backward, fewer where the forward
    is nearer. Each holds a microbatch's activations for longer. A backward that has its R keeps it,
    and one whose activations come back from the host gets none.
    """
    if ahead < 0:
        raise ScheduleError(f"ahead is {ahead}: the nearest legal value is 0")
    chosen = chosen_stages(schedule, stages)
    programs = strip_communication(schedule).programs
    return replace(schedule, programs=tuple(_insert(p, schedule, chosen, ahead) for p in programs))


def _insert(
    program: Program, schedule: Schedule, chosen: npt.NDArray[np.bool_], ahead: int
) -> Program:
    cell = program.stage.astype(np.int64) * schedule.microbatches + program.microbatch
    has_own = np.zeros(schedule.stages * schedule.microbatches, dtype=np.bool_)
    has_own[cell[(program.kind == Kind.R) | (program.kind == Kind.RELOAD)]] = True
    backward = np.flatnonzero((program.kind == Kind.B) | (program.kind == Kind.I))
    backward = backward[chosen[program.stage[backward]] & ~has_own[cell[backward]]]
    forward_at = np.full(len(has_own), -1, dtype=np.int64)
    forwards = np.flatnonzero(program.kind == Kind.F)
    forward_at[cell[forwards]] = forwards

    source = np.concatenate([np.arange(len(program)), backward])
    before = np.maximum(backward - ahead, forward_at[cell[backward]] + 1)
    place = np.concatenate([np.arange(len(program)), before])
    is_old = np.arange(len(source)) < len(program)
    order = np.lexsort((source, is_old, place))
    kind = program.kind[source]
    kind[~is_old] = Kind.R
    return Program(
        kind=kind[order],
        stage=program.stage[source][order],
        microbatch=program.microbatch[source][order],
    )
