"""Live activations over time: what each rank holds between forwards and their backwards.

A rank runs one action after another, so its program order alone says what is alive; times only
say when. That makes the curve exact for measured timelines too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Schedule
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
) -> tuple[Curve, ...]:
    """What each rank holds, a curve a rank.

    held_after_forward: [S], what one microbatch's forward of a stage keeps, from its start until
        the end of its backward; by default P/S, which counts in microbatches x 1/P of the model.
    held_after_input_grad: [S], what a split backward holds instead from the end of I to the end
        of W; by default as much.
    held_before_recompute: [S], what is held instead until R starts, or where there is none the
        backward; None for a stage that does not recompute. By default nothing where there is an R.
    All in the same unit, such as bytes; a slice of a microbatch holds its share.
    """
    compute = timeline.is_compute
    cell = timeline.stage[compute], timeline.microbatch[compute]
    kind, rank = timeline.kind[compute], timeline.rank[compute]
    kinds = {k: kind == k for k in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)}
    has_own = np.zeros((schedule.stages, schedule.microbatches), dtype=np.bool_)
    has_own[cell[0][kinds[Kind.R]], cell[1][kinds[Kind.R]]] = True
    forward = _table(held_after_forward, schedule, schedule.ranks / schedule.stages)[cell[0]]
    halved = (
        forward
        if held_after_input_grad is None
        else _table(held_after_input_grad, schedule, 0.0)[cell[0]]
    )
    before = _before(held_before_recompute, schedule)[cell[0]]
    before = np.where(np.isnan(before), np.where(has_own[cell], 0.0, forward), before)

    missing = forward - before
    begins = kinds[Kind.R] | ((kinds[Kind.B] | kinds[Kind.I]) & ~has_own[cell])
    at_start = np.where(kinds[Kind.F], before, np.where(begins, missing, 0.0))
    at_end = np.select(
        [kinds[Kind.B], kinds[Kind.I], kinds[Kind.W]], [-forward, halved - forward, -halved], 0.0
    )
    times = np.stack([timeline.start_s[compute], timeline.end_s[compute]], axis=1)
    change = np.stack([at_start, at_end], axis=1)
    happens = change != 0.0
    happens[:, 0] |= kinds[Kind.F] | kinds[Kind.R]
    happens[:, 1] |= ~(kinds[Kind.F] | kinds[Kind.R])
    bounds = np.searchsorted(rank, np.arange(timeline.ranks + 1))
    return tuple(
        Curve(
            times_s=np.concatenate([[0.0], times[first:last][happens[first:last]]]),
            values=np.concatenate([[0.0], np.cumsum(change[first:last][happens[first:last]])]),
        )
        for first, last in pairwise(bounds)
    )


def _table(given: Sequence[float] | None, schedule: Schedule, default: float) -> Floats:
    held = np.full(schedule.stages, default) if given is None else np.asarray(given, dtype=float)
    return held / schedule.slices


def _before(given: Sequence[float | None] | None, schedule: Schedule) -> Floats:
    """What is held before a recomputation, by stage; not a number where that is not said."""
    none = [float("nan")] * schedule.stages
    held = none if given is None else [float("nan") if g is None else g for g in given]
    return np.array(held) / schedule.slices
