"""Live activations over time: what each rank holds between forwards and their backwards.

A rank runs one action after another, so its program order alone says what is alive; times only
say when. That makes the curve exact for measured timelines too. Copies to the host and back run
beside the actions: what they move is in memory from a RELOAD's start and until an OFFLOAD's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.ir import COMPUTE_KINDS, COPY_KINDS, Kind, Schedule
from fullbore.timeline.timeline import Timeline

__all__ = ["Curve", "live_curves"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A step function: values[k] from times_s[k] until times_s[k + 1]; starts at time 0, value 0.

    Of equal times the last one holds.
    """

    times_s: Floats
    values: Floats

    @property
    def peak(self) -> float:
        """The largest value."""
        return float(self.values.max())


def live_curves(
    timeline: Timeline,
    schedule: Schedule,
    *,
    held_after_forward: Sequence[float] | None = None,
    held_after_input_grad: Sequence[float] | None = None,
    held_before_recompute: Sequence[float | None] | None = None,
    leaves_at_offload: Sequence[float | None] | None = None,
) -> tuple[Curve, ...]:
    """What each rank holds, a curve a rank.

    held_after_forward: [S], what one microbatch's forward of a stage keeps, from its start until
        the end of its backward; by default P/S, which counts in microbatches x 1/P of the model.
    held_after_input_grad: [S], what a split backward holds instead from the end of I to the end
        of W; by default as much.
    held_before_recompute: [S], what is held instead until R starts, or where there is none the
        backward; None for a stage that does not recompute. By default nothing where there is an R.
    leaves_at_offload: [S], what of it is away from the end of an OFFLOAD to the start of the
        RELOAD; by default, and where None, all that the forward keeps.
    All in the same unit, such as bytes; a slice of a microbatch holds its share.
    """
    own = timeline.kind < Kind.SEND_F
    cell = timeline.stage[own], timeline.microbatch[own]
    kind, rank = timeline.kind[own], timeline.rank[own]
    is_ = {k: kind == k for k in (*COMPUTE_KINDS, *COPY_KINDS)}
    has_own = np.zeros((schedule.stages, schedule.microbatches), dtype=np.bool_)
    has_own[cell[0][is_[Kind.R]], cell[1][is_[Kind.R]]] = True
    forward = _table(held_after_forward, schedule, schedule.ranks / schedule.stages)[cell[0]]
    halved = (
        forward
        if held_after_input_grad is None
        else _table(held_after_input_grad, schedule, 0.0)[cell[0]]
    )
    before = _given(held_before_recompute, schedule)[cell[0]]
    before = np.where(np.isnan(before), np.where(has_own[cell], 0.0, forward), before)
    leaving = _given(leaves_at_offload, schedule)[cell[0]]
    leaving = np.where(np.isnan(leaving), before, leaving)

    missing = forward - before
    begins = is_[Kind.R] | ((is_[Kind.B] | is_[Kind.I]) & ~has_own[cell])
    at_start = np.select(
        [is_[Kind.F], is_[Kind.RELOAD], begins], [before, leaving, missing], default=0.0
    )
    at_end = np.select(
        [is_[Kind.B], is_[Kind.I], is_[Kind.W], is_[Kind.OFFLOAD]],
        [-forward, halved - forward, -halved, -leaving],
        default=0.0,
    )
    times = np.stack([timeline.start_s[own], timeline.end_s[own]], axis=1)
    change = np.stack([at_start, at_end], axis=1)
    happens = change != 0.0
    begins_something = is_[Kind.F] | is_[Kind.R] | is_[Kind.RELOAD]
    happens[:, 0] |= begins_something
    happens[:, 1] |= ~begins_something
    bounds = np.searchsorted(rank, np.arange(timeline.ranks + 1))
    return tuple(
        _curve(times[first:last][happens[first:last]], change[first:last][happens[first:last]])
        for first, last in pairwise(bounds)
    )


def _curve(times_s: Floats, changes: Floats) -> Curve:
    """From the changes of one rank, as it came to them; copies end out of that order."""
    if (np.diff(times_s) < 0).any():
        order = np.argsort(times_s, kind="stable")
        times_s, changes = times_s[order], changes[order]
    return Curve(
        times_s=np.concatenate([[0.0], times_s]),
        values=np.concatenate([[0.0], np.cumsum(changes)]),
    )


def _table(given: Sequence[float] | None, schedule: Schedule, default: float) -> Floats:
    held = np.full(schedule.stages, default) if given is None else np.asarray(given, dtype=float)
    return held / schedule.slices


def _given(given: Sequence[float | None] | None, schedule: Schedule) -> Floats:
    """By stage; not a number where that is not said."""
    none = [float("nan")] * schedule.stages
    held = none if given is None else [float("nan") if g is None else g for g in given]
    return np.array(held) / schedule.slices
