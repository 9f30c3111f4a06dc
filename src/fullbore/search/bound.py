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
time; there a W may stand alone, with its I still to come, and holds what is held between the two.
If work(t) + work'(u) < busy, the two windows do not meet, for together they would hold everything.
Then the time between them is filled at best, so a step takes

    t + u + busy - work(t) - work'(u) = busy + (t - work(t)) + (u - work'(u))

and so it does with one of the windows alone. t - work(t), what is idle in a window, is largest just
before something more can begin, or is freed; these moments are tried. A longer window has no less
idle in it, so the most until a moment counts.

Where split backwards take longer than whole ones (host overhead, or by the costs), a W alone takes
w seconds and counts for d - I of them, since all of the difference is lost to its being split.
Whatever in the last u seconds is neither forward nor a backward that can have begun by then is such
a W, so it counts for (d - I) / w of its time at most.

For a span, time begins with the rank's own first action, and ends with its last; what has passed
the rank's first stage has done so after that, and what will pass it again does so before, while the
W of other ranks may come later. Host time before the first action is not in its span.

Memory and time. Each microbatch holds memory on a rank for at least the chain from its F on a stage
to the end of its backward there. What a rank holds, integrated over time, is at least M times that,
and at most the limit times the time from its first input on. So head + (the sum) / limit bounds the
makespan, and without the head the span. Where each stage and microbatch of a rank holds as much as
any other, the limit may be taken in whole such pieces, if what only backwards hold is left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullbore.search.heads import Side, fill_heads, sides_of
from fullbore.search.instance import Instance
from fullbore.search.jit import kernel
from fullbore.search.memory import ROUNDING

__all__ = ["Reach", "lower_bound", "reach_of"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_STEPS = 20_000_000  # about how many are taken for heads, and for windows, of all ranks
_LOOKED = 8  # microbatches for which they are taken in any case
_ROUNDING = 1e-12  # sums in another order than the simulator's may come out this much larger
_BEFORE = 1e-13  # of the time: what is freed so shortly before counts as not freed yet
_MEET = 1e-9  # windows that hold all but this share of what a rank does may meet


class _Heads(NamedTuple):
    """When rises and falls begin at the earliest [S, M]."""

    rises_s: Floats
    falls_s: Floats


class Reach(NamedTuple):
    """Of forwards and backwards, [2, S, M]: when they begin at the earliest, and how long before
    the end of the step at the latest, in seconds.
    """

    early_s: Floats
    late_s: Floats


def reach_of(instance: Instance) -> Reach:
    """When the actions of a step can begin at all, if microbatches of a stage come in order."""
    along, against = sides_of(instance)
    return _reach(along, _heads(instance, along, 0, 1), _heads(instance, against, 0, 1))


def _reach(side: Side, along: _Heads, against: _Heads) -> Reach:
    forward_s = side.rise[:, None] + against.falls_s[:, ::-1]
    back_s = side.fall[:, None] + against.rises_s[:, ::-1]
    return Reach(np.stack(along), np.stack([forward_s, back_s]))


def lower_bound(instance: Instance, *, spans: bool) -> float:
    """Seconds that the makespan, or the longest span of one rank, of any schedule takes."""
    sides = sides_of(instance)
    if not spans:
        heads = _heads(instance, sides[0], 0, 1), _heads(instance, sides[1], 0, 1)
        best = max(
            float(np.sum(_reach(sides[0], *heads), axis=0).max()),  # through
            *(_of_rank(instance, sides, heads, rank) for rank in range(instance.ranks)),
        )
        return best * (1 - _ROUNDING)
    best = 0.0
    for rank in range(instance.ranks):
        heads = _own_heads(instance, sides, rank)
        best = max(best, _of_rank(instance, sides, heads, rank) - instance.lead_s)
    return best * (1 - _ROUNDING)


def _of_rank(
    instance: Instance, sides: tuple[Side, Side], heads: tuple[_Heads, _Heads], rank: int
) -> float:
    """By what the rank does and holds, from when the heads count; the first host time included."""
    first = instance.own[instance.first[rank]]
    begin_s = float(heads[0].rises_s[first, 0])
    return max(
        begin_s + _held(instance, sides[0], rank),
        _windows(instance, sides, heads, rank),
    )


def _own_heads(instance: Instance, sides: tuple[Side, Side], rank: int) -> tuple[_Heads, _Heads]:
    """Since a rank's first action, and until its last: other ranks may do their W after that."""
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    pre_s = np.zeros(instance.stages)
    pre_s[own] = sides[1].pre[own]
    since, against = int(own[0]), sides[1]._replace(pre=pre_s)
    times = instance.ranks
    return _heads(instance, sides[0], since, times), _heads(instance, against, since, times)


def _heads(instance: Instance, side: Side, since: int, times: int) -> _Heads:
    """times: how often this is asked for, so that all together end within seconds."""
    shape = instance.stages, instance.microbatches
    made = _Heads(np.zeros(shape), np.zeros(shape))
    most = math.sqrt(_STEPS * instance.ranks / (times * instance.stages**2))
    fill_heads(instance, side, since, max(_LOOKED, int(most)), made.rises_s, made.falls_s)
    return made


def _windows(
    instance: Instance, sides: tuple[Side, Side], heads: tuple[_Heads, _Heads], rank: int
) -> float:
    """busy, and what is idle at least in the worst two windows that do not meet."""
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    each_s = sides[0].rise[own] + sides[0].fall[own] + sides[0].post[own]
    busy_s = instance.microbatches * float(each_s.sum())
    if busy_s <= 0.0:
        return 0.0
    work_s, idle_s = _moments(instance, sides[0], heads[0], own)
    late_work_s, late_idle_s = _moments(instance, sides[1], heads[1], own)
    most = np.maximum.accumulate(late_idle_s)
    room_s = busy_s * (1 - _MEET) - work_s
    fitting = np.searchsorted(late_work_s, room_s, side="left") - 1
    alone = idle_s[room_s > 0].max(initial=0.0)
    pairs = (idle_s + most[fitting])[fitting >= 0].max(initial=0.0)
    late = late_idle_s[late_work_s < busy_s * (1 - _MEET)].max(initial=0.0)
    return busy_s + float(max(alone, late, pairs))


def _moments(instance: Instance, side: Side, heads: _Heads, own: Indices) -> tuple[Floats, Floats]:
    """What a rank can have done at the most by the moments that matter, and how long it idled.

    By the former in ascending order: [3 v M] each. What has been idle stays so, and what has been
    done, too: so neither falls from one moment to the next.
    """
    each = len(own) ** 2 * instance.microbatches * instance.ranks
    most = max(_LOOKED, _STEPS // (3 * each))
    rises_s, falls_s = heads.rises_s[own, :most], heads.falls_s[own, :most]
    moments_s = np.unique(np.concatenate([rises_s, falls_s, falls_s + side.full[own, None]]))
    work_s = np.zeros(len(moments_s))
    room = _room(instance, side, own)
    there_s = float(heads.rises_s[own[0], 0])
    first_s = there_s if there_s > side.pre[own[0]] else 0.0
    _fill_work(instance, side, own, room, *heads, first_s, moments_s, work_s)
    work_s = moments_s - np.maximum.accumulate(moments_s - work_s)
    work_s = np.minimum.accumulate(work_s[::-1])[::-1]
    return work_s, moments_s - work_s


@kernel
def _fill_work(
    instance: Instance,
    side: Side,
    own: Indices,
    limit: float,
    rises_s: Floats,
    falls_s: Floats,
    first_s: float,  # when the first input is there: before that there is nothing to do but pres
    moments_s: Floats,
    work_s: Floats,  # out: what can be done by just before each moment
) -> None:
    value, need = np.zeros(2 * len(own)), np.zeros(2 * len(own))
    lone_s, share = 0.0, 0.0
    for stage in own:
        lone_s = max(lone_s, side.pre[stage])
        share = max(share, side.share[stage] if side.pre[stage] > 0 else 0.0)
    for number in range(len(moments_s)):
        now, room, done_s, with_rises_s = moments_s[number], limit, 0.0, 0.0
        for at in range(len(own)):
            stage, begun = own[at], 0.0
            for microbatch in range(instance.microbatches):
                since_s = now - rises_s[stage, microbatch]
                if since_s > 0.0:
                    begun += min(1.0, since_s / side.rise[stage]) if side.rise[stage] > 0 else 1.0
                since_s = now - falls_s[stage, microbatch]
                if since_s > 0.0:
                    done_s += min(since_s, side.fall[stage] + side.post[stage])
                if since_s > side.full[stage] + _BEFORE * now:
                    room += side.kept[stage]
            with_rises_s += begun * (side.rise[stage] + side.pre[stage])
            _fill_items(instance, side, stage, begun, value[2 * at :], need[2 * at :])
        if now > first_s:
            with_rises_s += lone_s
        most_s = min(now, done_s + with_rises_s)
        most_s += share * (now - most_s)  # a pre that is done apart takes longer than it counts
        work_s[number] = min(most_s, done_s + _packed(value, need, room))


@kernel
def _fill_items(
    instance: Instance, side: Side, stage: int, begun: float, value: Floats, need: Floats
) -> None:
    """Two things to pack for a stage, the one with more seconds for its memory first.

    A rise brings its pre along; of other microbatches there may be the pre alone. Where a pre
    alone is worth more, all of them come first, and rises only add what they need beyond that.
    """
    pre, rise, kept, half = side.pre[stage], side.rise[stage], side.kept[stage], side.half[stage]
    count = float(instance.microbatches)
    if pre * kept > (rise + pre) * half:
        value[0], need[0] = count * pre, count * half
        value[1], need[1] = begun * rise, begun * (kept - half)
    else:
        value[0], need[0] = begun * (rise + pre), begun * kept
        value[1], need[1] = (count - begun) * pre, (count - begun) * half


@kernel
def _packed(value: Floats, need: Floats, room: float) -> float:
    """The fractional knapsack: the most value of things that need no more than the room."""
    packed = 0.0
    for at in np.argsort(-value / np.maximum(need, 1e-300)):
        share = 1.0 if need[at] <= room else room / need[at]
        packed += share * value[at]
        room = max(0.0, room - share * need[at])
    return packed


def _held(instance: Instance, side: Side, rank: int) -> float:
    """Memory held on a rank, integrated over time, over its limit: seconds.

    In whole pieces, of which what only a backward needs is none; or all of it in any amounts.
    """
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    change, rise = instance.change.reshape(-1, 4)[own], instance.rise.reshape(-1, 4)[own]
    table, whole, halved = instance.duration_s.reshape(-1, 4)[own], change[:, 0], -change[:, 3]
    waits_s = _waits(side)[own]
    best = 0.0
    for extra, room in ((0.0, _room(instance, side, own)), (1.0, float(instance.limit[rank]))):
        joined = (whole + extra * rise[:, 1]) * table[:, 1]
        split = (whole + extra * rise[:, 2]) * table[:, 2] + halved * table[:, 3]
        last = np.minimum(joined, split) if instance.splits else joined
        total = instance.microbatches * float((whole * waits_s + last).sum())
        best = max(best, total / room if room > 0 else 0.0)
    return best


def _waits(side: Side) -> Floats:
    """[S] from the beginning of a rise to that of the fall, at the least."""
    up_s = np.concatenate([[0.0], np.cumsum(side.rise + side.hop_up)[:-1]])
    down_s = np.concatenate([[0.0], np.cumsum((side.fall + side.hop_down)[::-1])[:-1]])[::-1]
    return np.asarray(up_s[-1] + side.rise[-1] + down_s - up_s)


def _room(instance: Instance, side: Side, own: Indices) -> float:
    """What a rank can hold at the most: the limit, in whole pieces where all are of one size."""
    piece, limit = float(side.kept[own].max()), float(instance.limit[instance.home[own[0]]])
    sizes = np.abs(instance.change.reshape(-1, 4)[own])
    sizes = sizes[:, [0, 1, 3]] if instance.splits else sizes[:, :2]
    if piece <= 0.0 or np.any(sizes != piece):
        return limit
    return float(np.floor(limit / piece + ROUNDING)) * piece
