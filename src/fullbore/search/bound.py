"""A time below which no schedule of a placement can get, whatever its order and however found.

`heads` says when each forward and backward can begin at the earliest, and, from the other end, how
long at the least it is from its end to the end of the step. From these come three bounds.

Through. Where something begins at the earliest at h, takes p, and has q at the least behind it, a
step takes h + p + q.

Windows of a rank. A rank has M (F + d) to do for each of its stages, d = min(B, I + W), busy
seconds in all. In the first t seconds it can have done no more than work(t): of each thing no more
than the time since it can begin at the earliest, and of what rises no more than memory has room for
at t beyond what has fallen by then (a fractional knapsack, the most seconds in the least memory
first). In the last u seconds it can do no more than work'(u), by the same argument backwards in
time. If work(t) + work'(u) < busy, the two windows do not meet, for together they would hold
everything. Then the time between them is filled at best, so a step takes

    t + u + busy - work(t) - work'(u) = busy + (t - work(t)) + (u - work'(u))

and so it does with one of the windows alone. t - work(t) is largest just before something more
can begin, or is freed; these moments are tried. For a span, time begins with the rank's own first
action, and ends with its last; what has passed the rank's first stage has done so after that, and
what will pass it again does so before, while the W of other ranks may come later.

Memory and time. Each microbatch holds memory on a rank for at least the chain from its F on a
stage to the end of its backward there. What a rank holds, integrated over time, is at least M times
that, and at most the limit times the time from its first input on (the limit in whole pieces, where
each stage and microbatch of a rank holds as much as any other). So head + (the sum) / limit bounds
the makespan, and without the head the span.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullbore.search.heads import Side, fill_heads, sides_of
from fullbore.search.instance import Instance
from fullbore.search.jit import kernel
from fullbore.search.memory import ROUNDING

__all__ = ["lower_bound"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_ROUNDING = 1e-12  # sums in another order than the simulator's may come out this much larger
_MEET = 1e-9  # windows that hold all but this share of what a rank does may meet


class _Heads(NamedTuple):
    """When rises and falls begin at the earliest [S, M]."""

    rises_s: Floats
    falls_s: Floats


def lower_bound(instance: Instance, *, spans: bool) -> float:
    """Seconds that the makespan, or the longest span of one rank, of any schedule takes."""
    sides = sides_of(instance)
    both = _heads(instance, sides[0], 0), _heads(instance, sides[1], 0)
    best = 0.0 if spans else _through(sides[0], *both)
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        begin_s = 0.0 if spans else float(both[0].rises_s[own[0], 0])
        best = max(best, begin_s + _held(instance, sides[0], rank, own))
        heads = _own_heads(instance, sides, own) if spans else both
        lead_s = instance.lead_s if spans else 0.0  # a span begins where the first action does
        best = max(best, _windows(instance, sides, heads, rank) - lead_s)
    return best * (1 - _ROUNDING)


def _own_heads(instance: Instance, sides: tuple[Side, Side], own: Indices) -> tuple[_Heads, _Heads]:
    """Since a rank's first action, and until its last: other ranks may do their W after that."""
    pre_s = np.zeros(instance.stages)
    pre_s[own] = sides[1].pre[own]
    since, against = int(own[0]), sides[1]._replace(pre=pre_s)
    return _heads(instance, sides[0], since), _heads(instance, against, since)


def _heads(instance: Instance, side: Side, since: int) -> _Heads:
    shape = instance.stages, instance.microbatches
    made = _Heads(np.zeros(shape), np.zeros(shape))
    fill_heads(instance, side, since, made.rises_s, made.falls_s)
    return made


def _through(side: Side, along: _Heads, against: _Heads) -> float:
    """Beginning, length and what follows, of the forward or input gradient with the most."""
    forward = along.rises_s + side.rise[:, None] + against.falls_s[:, ::-1]
    back = along.falls_s + side.fall[:, None] + against.rises_s[:, ::-1]
    return float(max(forward.max(), back.max()))


def _windows(
    instance: Instance, sides: tuple[Side, Side], heads: tuple[_Heads, _Heads], rank: int
) -> float:
    """busy, and what is idle at least in the worst two windows that do not meet."""
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    each_s = sides[0].rise[own] + sides[0].fall[own] + sides[0].post[own]
    busy_s = instance.microbatches * float(each_s.sum())
    if busy_s <= 0.0:
        return 0.0
    work_s, idle_s = _moments(instance, sides[0], heads[0], rank)
    late_work_s, late_idle_s = _moments(instance, sides[1], heads[1], rank)
    most = np.maximum.accumulate(late_idle_s)
    room_s = busy_s * (1 - _MEET) - work_s
    fitting = np.searchsorted(late_work_s, room_s, side="left") - 1
    alone = idle_s[room_s > 0].max(initial=0.0)
    pairs = (idle_s + most[fitting])[fitting >= 0].max(initial=0.0)
    late = late_idle_s[late_work_s < busy_s * (1 - _MEET)].max(initial=0.0)
    return busy_s + float(max(alone, late, pairs))


def _moments(instance: Instance, side: Side, heads: _Heads, rank: int) -> tuple[Floats, Floats]:
    """What a rank can have done at the most by the moments that matter, and how long it idled.

    By the former in ascending order: [3 v M] each.
    """
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    freed_s = heads.falls_s[own] + side.full[own, None]
    moments_s = np.concatenate([heads.rises_s[own], heads.falls_s[own], freed_s]).ravel()
    moments_s = np.unique(moments_s)
    work_s = np.zeros(len(moments_s))
    room = _room(instance, side, rank)
    _fill_work(instance, side, own, room, heads.rises_s, heads.falls_s, moments_s, work_s)
    order = np.argsort(work_s, kind="stable")
    return work_s[order], (moments_s - work_s)[order]


@kernel
def _fill_work(
    instance: Instance,
    side: Side,
    own: Indices,
    limit: float,
    rises_s: Floats,
    falls_s: Floats,
    moments_s: Floats,
    work_s: Floats,  # out: what can be done by each moment
) -> None:
    value, need = np.zeros(2 * len(own)), np.zeros(2 * len(own))
    for number in range(len(moments_s)):
        now, room, done_s = moments_s[number], limit, 0.0
        for at in range(len(own)):
            stage, begun = own[at], 0.0
            for microbatch in range(instance.microbatches):
                since_s = now - rises_s[stage, microbatch]
                if since_s > 0.0:
                    begun += min(1.0, since_s / side.rise[stage]) if side.rise[stage] > 0 else 1.0
                since_s = now - falls_s[stage, microbatch]
                if since_s > 0.0:
                    done_s += min(since_s, side.fall[stage] + side.post[stage])
                if since_s >= side.full[stage] * (1.0 - ROUNDING):
                    room += side.kept[stage]
            value[2 * at] = begun * (side.rise[stage] + side.pre[stage])
            need[2 * at] = begun * side.kept[stage]
            value[2 * at + 1] = (instance.microbatches - begun) * side.pre[stage]
            need[2 * at + 1] = (instance.microbatches - begun) * side.half[stage]
        work_s[number] = min(now, done_s + _packed(value, need, room))


@kernel
def _packed(value: Floats, need: Floats, room: float) -> float:
    """The fractional knapsack: the most value of things that need no more than the room."""
    packed = 0.0
    for at in np.argsort(-value / np.maximum(need, 1e-300)):
        share = 1.0 if need[at] <= room else room / need[at]
        packed += share * value[at]
        room = max(0.0, room - share * need[at])
    return packed


def _held(instance: Instance, side: Side, rank: int, own: Indices) -> float:
    """Memory held on a rank, integrated over time, over its limit: seconds."""
    change = instance.change.reshape(-1, 4)[own]
    table = instance.duration_s.reshape(-1, 4)[own]
    up_s = np.concatenate([[0.0], np.cumsum(side.rise + side.hop_up)[:-1]])
    down_s = np.concatenate([[0.0], np.cumsum((side.fall + side.hop_down)[::-1])[:-1]])[::-1]
    waits_s = (up_s[-1] + side.rise[-1] + down_s - up_s)[own]
    whole, halved = change[:, 0], -change[:, 3]
    joined = (whole + instance.rise.reshape(-1, 4)[own, 1]) * table[:, 1]
    split = (whole + instance.rise.reshape(-1, 4)[own, 1]) * table[:, 2] + halved * table[:, 3]
    last = np.minimum(joined, split) if instance.splits else joined
    total = instance.microbatches * float((whole * waits_s + last).sum())
    room = _room(instance, side, rank)
    return total / room if room > 0 else 0.0


def _room(instance: Instance, side: Side, rank: int) -> float:
    """What a rank can hold at the most: the limit, in whole pieces where all are of one size."""
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    piece, limit = float(side.kept[own].max()), float(instance.limit[rank])
    sizes = np.abs(instance.change.reshape(-1, 4)[own])
    sizes = sizes[:, [0, 1, 3]] if instance.splits else sizes[:, :2]
    if piece <= 0.0 or np.any(sizes != piece):
        return limit
    return float(np.floor(limit / piece + ROUNDING)) * piece
