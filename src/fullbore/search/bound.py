"""A time below which no schedule of a placement can get, whatever its order and however found.

Letters: a rank r holds stages s_1 < ... < s_v. An action takes its seconds and the host overhead
before it; a backward of a stage and microbatch keeps its rank for d = min(B, I + W), and the
gradient of its input is there e = min(B, I) after it has started, at the earliest. A message is
there occupancy + latency after it was made, at the earliest. Chains add these up.

Busy time. r works M (F + d) for each of its stages, so busy_r in all. Its first action is an F of
s_1, whose input is there after a chain of F over stages 0 .. s_1 - 1: head_r.

Idle before the first backward. The first backward on r is one of s_v (every microbatch passes
s_v before it comes back to the others), and not before first_r: the chain up to the last stage and
back down to s_v. Until then r runs forwards only, and gives back no memory. Forwards that are
begun until then together hold no more than the limit. So the time for which they run is at most
that of the fractional knapsack that packs the most seconds of F into the limit, from each
stage no more than M of them, nor more than the time since its first input could be there. What is
left of head_r .. first_r is idle.

Idle after the last forward. When the last F on r ends, r has backwards to do only, and the last
microbatch has at least the chain from the end of that F up to the last stage and down to stage 0
before it (shortest for s_v; down to s_1 where spans count). What r can do meanwhile is what was
held at that moment: at most the knapsack that packs the most seconds of d, or of W that wait, into
the limit. What is left of that chain is idle. After the last backward (I) on r, which is one of
s_1, the same holds for the chain below s_1 and the W that wait. The second interval is part of
the first, so the larger of the two idle times counts. Where not all M v forwards fit into the
limit at once, the last F begins after first_r; then the intervals before and after are disjoint
and both idle times count, otherwise the larger one.

    makespan >= max over r of  head_r + busy_r + idle_r      span >= max over r of  busy_r + idle_r

Memory and time. Each microbatch holds memory on r for at least the chain from its F on a stage
to the end of its backward there. What r holds, integrated over time, is at least M times that, and
at most the limit times the time from head_r on (the limit in whole pieces, where each stage and
microbatch of a rank holds as much as any other). So head_r + (the sum) / limit bounds the makespan,
and without head_r the span.

One microbatch. The chain of one microbatch, all the way up and down, bounds the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance
from fullbore.search.memory import ROUNDING

__all__ = ["lower_bound"]

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12  # sums in another order than the simulator's may come out this much larger


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Seconds of each stage [S], host overhead included, and when things are there at the earliest.

    up_s, back_s: F, and the least until a backward's input gradient is there. whole_s: the least
    that a backward keeps its rank. there_up_s: when the input of the first F can be there;
    there_down_s: the gradient for the first backward. below_s: from the moment that a stage's input
    gradient is made until the end of stage 0's backward.
    """

    up_s: Floats
    back_s: Floats
    whole_s: Floats
    weight_s: Floats
    there_up_s: Floats
    there_down_s: Floats
    below_s: Floats


def lower_bound(instance: Instance, *, spans: bool) -> float:
    """Seconds that the makespan, or the longest span of one rank, of any schedule takes."""
    chains = _chains(instance)
    single = chains.there_down_s[0] + chains.whole_s[0]
    best = 0.0 if spans else float(single)
    lead = instance.lead_s if spans else 0.0  # a span begins where the first action itself does
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        head = 0.0 if spans else float(chains.there_up_s[own[0]])
        best = max(best, head - lead + _busy(instance, chains, rank, own, spans=spans))
        best = max(best, head + _held(instance, chains, rank, own))
    return best * (1 - _ROUNDING)


def _chains(instance: Instance) -> _Chains:
    table = instance.duration_s.reshape(-1, 4) + instance.lead_s
    up, whole, half, weight = table.T
    split = half + weight
    if not instance.splits:
        half, split, weight = whole, whole, np.zeros(len(whole))
    back, least = np.minimum(whole, half), np.minimum(whole, split)
    hop_s = instance.hop_s + instance.occupancy_s
    hop_up = np.where(instance.link[0] >= 0, hop_s, 0.0)
    hop_down = np.where(instance.link[1] >= 0, hop_s, 0.0)
    there_up = np.concatenate([[0.0], np.cumsum(up + hop_up)[:-1]])
    top = there_up[-1] + up[-1]
    there_down = top + np.concatenate([[0.0], np.cumsum((back + hop_down)[::-1])[:-1]])[::-1]
    below = there_down[0] + least[0] - there_down - back
    below[0] = max(0.0, least[0] - back[0])
    return _Chains(
        up_s=up,
        back_s=back,
        whole_s=least,
        weight_s=weight,
        there_up_s=there_up,
        there_down_s=there_down,
        below_s=below,
    )


def _busy(
    instance: Instance, chains: _Chains, rank: int, own: npt.NDArray[np.int64], *, spans: bool
) -> float:
    """busy_r + idle_r."""
    busy = instance.microbatches * float((chains.up_s[own] + chains.whole_s[own]).sum())
    before = _idle_before(instance, chains, rank, own)
    after = _idle_after(instance, chains, rank, own, spans=spans)
    held = instance.microbatches * float(instance.rise.reshape(-1, 4)[own, 0].sum())
    return busy + (before + after if held > instance.limit[rank] else max(before, after))


def _idle_before(
    instance: Instance, chains: _Chains, rank: int, own: npt.NDArray[np.int64]
) -> float:
    until = chains.there_down_s[own[-1]]
    most = np.minimum(instance.microbatches * chains.up_s[own], until - chains.there_up_s[own])
    need = instance.rise.reshape(-1, 4)[own, 0] * most / _positive(chains.up_s[own])
    work = _packed(most, need, _room(instance, rank, own))
    return max(0.0, float(until - chains.there_up_s[own[0]]) - work)


def _idle_after(
    instance: Instance, chains: _Chains, rank: int, own: npt.NDArray[np.int64], *, spans: bool
) -> float:
    """Idle time after the last forward, or after the last backward if that is more."""
    change = instance.change.reshape(-1, 4)[own]
    limit, count = _room(instance, rank, own), instance.microbatches
    end = chains.there_down_s[own[0]] + chains.back_s[own[0]]
    low = float(chains.below_s[own[0]]) if not spans else 0.0
    chain = float(end - chains.there_up_s[own[-1]] - chains.up_s[own[-1]]) + low
    work_s = np.concatenate([chains.whole_s[own], chains.weight_s[own]]) * count
    need = np.concatenate([change[:, 0], -change[:, 3]]) * count
    after_forward = chain - _packed(work_s, need, limit)
    weights = _packed(chains.weight_s[own] * count, -change[:, 3] * count, limit)
    return max(0.0, after_forward, low - weights if not spans else 0.0)


def _held(instance: Instance, chains: _Chains, rank: int, own: npt.NDArray[np.int64]) -> float:
    """Memory held on a rank, integrated over time, over its limit: seconds."""
    change = instance.change.reshape(-1, 4)[own]
    table = instance.duration_s.reshape(-1, 4)[own]
    waits = chains.there_down_s[own] - chains.there_up_s[own]
    whole, halved = change[:, 0], -change[:, 3]
    joined = (whole + instance.rise.reshape(-1, 4)[own, 1]) * table[:, 1]
    split = (whole + instance.rise.reshape(-1, 4)[own, 1]) * table[:, 2] + halved * table[:, 3]
    last = np.minimum(joined, split) if instance.splits else joined
    total = instance.microbatches * float((whole * waits + last).sum())
    room = _room(instance, rank, own)
    return total / room if room > 0 else 0.0


def _room(instance: Instance, rank: int, own: npt.NDArray[np.int64]) -> float:
    """What a rank can hold at the most: the limit, in whole pieces where all are of one size."""
    change = np.abs(instance.change.reshape(-1, 4)[own])
    piece, limit = float(change[:, 0].max()), float(instance.limit[rank])
    sizes = change[:, [0, 1, 3]] if instance.splits else change[:, :2]
    if piece <= 0.0 or np.any(sizes != piece):
        return limit
    return float(np.floor(limit / piece + ROUNDING)) * piece


def _packed(value: Floats, need: Floats, room: float) -> float:
    """The fractional knapsack: the most value of things that need no more than the room."""
    order = np.argsort(-value / _positive(need), kind="stable")
    packed = 0.0
    for at in order.tolist():
        share = 1.0 if need[at] <= room else max(0.0, room) / need[at]
        packed += share * float(value[at])
        room -= share * float(need[at])
    return packed


def _positive(values: Floats) -> Floats:
    return np.where(values > 0, values, 1e-300)
