"""Activations that leave for the host after their forward and are back before their backward.

    rank 0  0F0 0F1 0F2 0B0 0B1 0B2   ->   rank 0  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 ...

A copy runs beside computation, so what it costs a rank is only what of it has not ended when the
backward wants to begin. An OFFLOAD stands right after its forward; a RELOAD some actions ahead of
its backward: few, and the backward waits; many, and less memory is saved.
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

__all__ = ["offload"]

Mask = npt.NDArray[np.bool_]


def offload(
    schedule: Schedule,
    *,
    stages: Collection[int] | None = None,
    away: int = 1,
    ahead: int = 1,
) -> Schedule:
    """The same schedule with an OFFLOAD and a RELOAD for activations that live long enough.

    Without sends and receives; linear in actions.

    stages: whose activations leave, all if not given. ahead: how many compute actions of its rank
    stand between a RELOAD and its backward. away: how many must stand between the OFFLOAD and that
    RELOAD at least; what would be back sooner stays. What has its OFFLOAD, or an R, keeps it.
    """
    for name, value, least in (("away", away, 1), ("ahead", ahead, 0)):
        if value < least:
            raise ScheduleError(f"{name} is {value}: the nearest legal value is {least}")
    chosen = chosen_stages(schedule, stages)
    programs = strip_communication(schedule).programs
    return replace(
        schedule,
        programs=tuple(
            _insert(p, schedule.microbatches, leaves=chosen, away=away, ahead=ahead)
            for p in programs
        ),
    )


def _insert(program: Program, microbatches: int, *, leaves: Mask, away: int, ahead: int) -> Program:
    kind = program.kind
    cell = program.stage.astype(np.int64) * microbatches + program.microbatch
    compute = np.flatnonzero(kind < Kind.OFFLOAD)
    count = np.cumsum(kind < Kind.OFFLOAD) - 1  # compute[count[i]] is i itself
    forward_at = np.full(len(leaves) * microbatches, len(program), dtype=np.int64)
    forward_at[cell[kind == Kind.F]] = np.flatnonzero(kind == Kind.F)
    settled = np.zeros(len(forward_at), dtype=np.bool_)
    settled[cell[(kind == Kind.OFFLOAD) | (kind == Kind.RELOAD) | (kind == Kind.R)]] = True

    backward = np.flatnonzero((kind == Kind.B) | (kind == Kind.I))
    backward = backward[leaves[program.stage[backward]] & ~settled[cell[backward]]]
    backward = backward[forward_at[cell[backward]] < backward]
    forward = forward_at[cell[backward]]
    long = count[backward] - count[forward] - 1 >= away + ahead
    forward, backward = forward[long], backward[long]

    # each new action stands before an old one, two of them at one place as they are listed here
    source = np.concatenate([forward, backward, np.arange(len(program))])
    before = compute[count[backward] - ahead]
    order = np.argsort(
        np.concatenate([forward + 1, before, np.arange(len(program))]), kind="stable"
    )
    kinds = kind[source]
    kinds[: len(forward)] = Kind.OFFLOAD
    kinds[len(forward) : len(forward) + len(backward)] = Kind.RELOAD
    return Program(
        kind=kinds[order],
        stage=program.stage[source][order],
        microbatch=program.microbatch[source][order],
    )
