"""The figures of a timeline: makespan, busy and idle, three bubbles, peak activations.

"Bubble" has several meanings in print, so each has a name of its own here and no figure is ever
called just "bubble":

    bubble_fraction       idle / (P * makespan): the headline; GPipe and 1F1B (P-1)/(M+P-1)
    bubble_overhead       idle / busy: Megatron-LM's and Llama 3's; GPipe and 1F1B (P-1)/M
    span_bubble_fraction  1 - busy / (P * longest span of one rank): the zero-bubble papers'

Only compute is busy: waiting, sending without overlap and host overhead all count as idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Schedule
from fullbore.timeline.live import live_curves
from fullbore.timeline.timeline import Timeline

__all__ = ["Summary", "summarize"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one step; tuples have one entry a rank.

    idle_s = makespan_s - busy_s = warmup + steady + cooldown. warmup_idle_s: before the rank's
    first backward starts. cooldown_idle_s: after its last forward has ended (and its first backward
    has started). imbalance_s: the busiest rank's busy time minus this one's, a part of idle_s.
    peak_activations: microbatches x 1/P of the model.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    warmup_idle_s: tuple[float, ...]
    steady_idle_s: tuple[float, ...]
    cooldown_idle_s: tuple[float, ...]
    imbalance_s: tuple[float, ...]
    bubble_fraction: float
    bubble_overhead: float
    span_bubble_fraction: float
    peak_activations: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compute:
    """The compute spans of a timeline, arrays of one length."""

    ranks: int
    rank: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    start_s: Floats
    end_s: Floats


def summarize(timeline: Timeline, schedule: Schedule) -> Summary:
    """The figures of a timeline, simulated or measured, of this schedule."""
    chosen = timeline.is_compute
    compute = _Compute(
        ranks=timeline.ranks,
        rank=timeline.rank[chosen],
        kind=timeline.kind[chosen],
        start_s=timeline.start_s[chosen],
        end_s=timeline.end_s[chosen],
    )
    makespan_s, phases = timeline.makespan_s, _phases(compute)
    busy = _sum(compute, compute.end_s - compute.start_s)
    idle = makespan_s - busy
    warm = _idle_until(compute, phases.warm_until_s)
    before_cool = _idle_until(compute, phases.cool_from_s)
    return Summary(
        makespan_s=makespan_s,
        busy_s=_tuple(busy),
        idle_s=_tuple(idle),
        warmup_idle_s=_tuple(warm),
        steady_idle_s=_tuple(before_cool - warm),
        cooldown_idle_s=_tuple(idle - before_cool),
        imbalance_s=_tuple(busy.max() - busy),
        bubble_fraction=_share(float(idle.sum()), timeline.ranks * makespan_s),
        bubble_overhead=_share(float(idle.sum()), float(busy.sum())),
        span_bubble_fraction=_span_bubble(compute, float(busy.sum())),
        peak_activations=tuple(curve.peak for curve in live_curves(timeline, schedule)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """When each rank's warm-up ends and its cool-down begins, seconds [P]."""

    warm_until_s: Floats
    cool_from_s: Floats


def _phases(compute: _Compute) -> _Phases:
    """A rank that runs no backward (evaluation) is warming up until its last forward has ended."""
    forward = compute.kind == Kind.F
    backward = (compute.kind == Kind.B) | (compute.kind == Kind.I)
    last_forward = np.zeros(compute.ranks)
    np.maximum.at(last_forward, compute.rank[forward], compute.end_s[forward])
    first_backward = np.full(compute.ranks, np.inf)
    np.minimum.at(first_backward, compute.rank[backward], compute.start_s[backward])
    first_backward = np.where(np.isinf(first_backward), last_forward, first_backward)
    return _Phases(
        warm_until_s=first_backward, cool_from_s=np.maximum(last_forward, first_backward)
    )


def _idle_until(compute: _Compute, limit_s: Floats) -> Floats:
    """Idle seconds of each rank [P] from 0 to its limit [P]."""
    limit = limit_s[compute.rank]
    worked = np.minimum(compute.end_s, limit) - np.minimum(compute.start_s, limit)
    return limit_s - _sum(compute, worked)


def _span_bubble(compute: _Compute, busy_s: float) -> float:
    """1 - busy / (P * the longest time from one rank's first start to its last end)."""
    first = np.full(compute.ranks, np.inf)
    np.minimum.at(first, compute.rank, compute.start_s)
    last = np.zeros(compute.ranks)
    np.maximum.at(last, compute.rank, compute.end_s)
    longest = float(np.maximum(last - first, 0.0).max())
    return _share(compute.ranks * longest - busy_s, compute.ranks * longest)


def _sum(compute: _Compute, values: Floats) -> Floats:
    """The sum of a value a span, for each rank [P]."""
    total = np.bincount(compute.rank, weights=values, minlength=compute.ranks)
    return total.astype(np.float64)


def _tuple(values: Floats) -> tuple[float, ...]:
    """As plain numbers; a time that rounding has put below zero is none."""
    return tuple(max(0.0, float(value)) for value in values)


def _share(part: float, whole: float) -> float:
    return max(0.0, part / whole) if whole > 0 else 0.0
