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
) -> tuple[Curve, ...]:
    """What each rank holds, a curve a rank.

    held_after_forward: [S], what one microbatch's forward of a stage keeps, from its start until
        the end of its backward; by default P/S, which counts in microbatches x 1/P of the model.
    held_after_input_grad: [S], what of it a split backward keeps from the end of I to the end of
        W; by default all of it. Both in the same unit, such as bytes.
    """
    unit = schedule.ranks / schedule.stages
    forward = _table(held_after_forward, schedule.stages, unit)
    kept = forward if held_after_input_grad is None else _table(held_after_input_grad, 0, 0.0)
    change = np.zeros((len(Kind), schedule.stages))
    change[Kind.F], change[Kind.B] = forward, -forward
    change[Kind.I], change[Kind.W] = kept - forward, -kept
    compute = timeline.is_compute
    rank, kind = timeline.rank[compute], timeline.kind[compute]
    delta = change[kind, timeline.stage[compute]]
    at_s = np.where(kind == Kind.F, timeline.start_s[compute], timeline.end_s[compute])
    bounds = np.searchsorted(rank, np.arange(timeline.ranks + 1))
    return tuple(
        Curve(
            times_s=np.concatenate([[0.0], at_s[first:last]]),
            values=np.concatenate([[0.0], np.cumsum(delta[first:last])]),
        )
        for first, last in pairwise(bounds)
    )


def _table(given: Sequence[float] | None, stages: int, default: float) -> Floats:
    return np.full(stages, default) if given is None else np.asarray(given, dtype=np.float64)
