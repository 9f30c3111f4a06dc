"""How early, at the least, each forward and backward begins: a relaxation, by microbatches.

A pass goes through a pipeline twice: up, where what a microbatch holds on each rank rises, and back
down, where it falls. Seen backwards in time a step is another such pass: the gradients' way, from
stage 0 up, comes first, and the forwards follow. So the same kernels tell how early things can
begin, and how long, at the least, it is from their end to the end of the step; `Side` is either.

A rise of a stage is its F; seen backwards it is its I, before which comes the W (`pre`). A fall
is the I, after which comes the W (`post`); seen backwards it is the F. A backward counts for
d = min(B, I + W) seconds, of which the input gradient takes e = min(B, I), and the rest is W: a
split backward takes as long, or longer, and so does a whole one until its input gradient is there.

What a rise waits for: its input, and what its rank has certainly done before. Those are the rises
of earlier microbatches here, those of the rank's earlier stages up to this microbatch, and as many
whole falls as it takes until there is room in memory. A fall waits likewise. (All microbatches
of a stage are alike, so they may be taken to come in order; see `instance`.) A rank does one thing
at a time: a set of things, each with its earliest beginning, is done, at the earliest, when they
are done in the order of those.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance
from fullbore.search.jit import kernel
from fullbore.search.memory import ROUNDING

__all__ = ["Side", "fill_heads", "sides_of"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Side(NamedTuple):
    """One direction of time. All are [S]: seconds, host overhead included, or what is held.

    hop_up, hop_down: from a stage's rise to the next stage, from its fall to the one before;
    busy_up, busy_down: for how much of that a message occupies its link. kept: from the beginning
    of a rise to the end of the fall, of which half until the end of the post. half: what a pre
    holds.
    full: what of a fall must be over until all that it can free is free. share: what a pre counts
    for, of the seconds that it takes where it is not done in one with the rise.
    """

    pre: Floats
    rise: Floats
    fall: Floats
    post: Floats
    full: Floats
    hop_up: Floats
    hop_down: Floats
    busy_up: Floats
    busy_down: Floats
    kept: Floats
    half: Floats
    share: Floats


def sides_of(instance: Instance) -> tuple[Side, Side]:
    """A step as time goes, and backwards."""
    table = instance.duration_s.reshape(-1, 4) + instance.lead_s
    forward, whole, half, weight = (np.ascontiguousarray(column) for column in table.T)
    kept = np.ascontiguousarray(instance.change.reshape(-1, 4)[:, 0])
    least, back, halved = whole, whole, kept
    if instance.splits:
        least = np.minimum(whole, half + weight)
        back = np.minimum(least, half)
        halved = np.minimum(kept, -instance.change.reshape(-1, 4)[:, 3])
    frees_early = halved < kept
    pre = least - back
    takes = np.maximum(pre, half + weight - back) if instance.splits else pre
    share = np.divide(pre, takes, out=np.ones_like(pre), where=takes > 0)
    hops = np.where(instance.link >= 0, instance.hop_s + instance.occupancy_s, 0.0)
    busy = np.where(instance.link >= 0, instance.occupancy_s, 0.0)
    along = Side(
        pre=np.zeros(len(forward)),
        rise=forward,
        fall=back,
        post=least - back,
        full=np.where(frees_early, back, least),
        hop_up=hops[0],
        hop_down=hops[1],
        busy_up=busy[0],
        busy_down=busy[1],
        kept=kept,
        half=halved,
        share=np.ones_like(pre),
    )
    against = Side(
        pre=pre,
        rise=back,
        fall=forward,
        post=np.zeros(len(forward)),
        full=forward,
        hop_up=np.roll(hops[1], -1),  # what is of two stages, under the number of the other one
        hop_down=np.roll(hops[0], 1),
        busy_up=np.roll(busy[1], -1),
        busy_down=np.roll(busy[0], 1),
        kept=kept,
        half=halved,
        share=share,
    )
    return along, against


class _Before(NamedTuple):
    """What a rank does before something: scratch, by the rank's own stages [v].

    risen: rises. fallen: falls that come before in any case. more: with those, too, without which
    there is no room in memory. seen [2, v]: how many of them a walk has passed.
    """

    risen: Indices
    fallen: Indices
    more: Indices
    seen: Indices


@kernel
def fill_heads(
    instance: Instance, side: Side, since: int, looked: int, rises_s: Floats, falls_s: Floats
) -> None:
    """When each rise (after its pre) and each fall begins at the earliest: out [S, M].

    since: the first stage that counts, whose inputs are all there at 0; 0 for the whole pipeline.
    looked: for how many microbatches everything is looked at that comes before; of later ones
    only their inputs and their predecessors on the stage, since the time grows with the square.
    """
    stages, home, own, first = instance.stages, instance.home, instance.own, instance.first
    up_s, down_s = np.zeros(stages), np.zeros(stages)  # when the last message has left
    most = int((first[1:] - first[:-1]).max())
    before = _Before(
        np.zeros(most, dtype=np.int64),
        np.zeros(most, dtype=np.int64),
        np.zeros(most, dtype=np.int64),
        np.zeros((2, most), dtype=np.int64),
    )
    for microbatch in range(instance.microbatches):
        for stage in range(since, stages):
            there_s, begin = 0.0, first[home[stage]]
            if stage > since:
                made_s = rises_s[stage - 1, microbatch] + side.rise[stage - 1]
                up_s[stage - 1] = max(made_s, up_s[stage - 1]) + side.busy_up[stage - 1]
                there_s = up_s[stage - 1] + side.hop_up[stage - 1] - side.busy_up[stage - 1]
            if microbatch >= looked:
                done_s = rises_s[stage, microbatch - 1] + side.rise[stage]
                rises_s[stage, microbatch] = max(there_s, done_s)
                continue
            for at in range(begin, first[home[stage] + 1]):
                counts = since <= own[at] <= stage
                before.risen[at - begin] = microbatch + (own[at] < stage) if counts else 0
                before.fallen[at - begin] = 0
            done_s = _done(instance, side, since, stage, microbatch, True, before, rises_s, falls_s)
            rises_s[stage, microbatch] = max(there_s, done_s)
        for stage in range(stages - 1, since - 1, -1):
            there_s, begin = rises_s[stage, microbatch] + side.rise[stage], first[home[stage]]
            if stage < stages - 1:
                made_s = falls_s[stage + 1, microbatch] + side.fall[stage + 1]
                down_s[stage + 1] = max(made_s, down_s[stage + 1]) + side.busy_down[stage + 1]
                left_s = down_s[stage + 1] + side.hop_down[stage + 1] - side.busy_down[stage + 1]
                there_s = max(there_s, left_s)
            if microbatch >= looked:
                done_s = falls_s[stage, microbatch - 1] + side.fall[stage]
                falls_s[stage, microbatch] = max(there_s, done_s)
                continue
            for at in range(begin, first[home[stage] + 1]):
                before.risen[at - begin] = microbatch + 1 if own[at] >= since else 0
                counts = own[at] >= stage
                before.fallen[at - begin] = microbatch + (own[at] > stage) if counts else 0
            done_s = _done(
                instance, side, since, stage, microbatch, False, before, rises_s, falls_s
            )
            falls_s[stage, microbatch] = max(there_s, done_s)


@kernel
def _done(
    instance: Instance,
    side: Side,
    since: int,
    stage: int,
    microbatch: int,
    rising: bool,  # noqa: FBT001 (numba has no keyword-only)
    before: _Before,
    rises_s: Floats,
    falls_s: Floats,
) -> float:
    """When the rank of a stage has done, at the earliest, what it does before this.

    Of the falls that make room it may be any that are over, so they are taken to be those that can
    begin first, and as short as the shortest.
    """
    rank = instance.home[stage]
    own = instance.own[instance.first[rank] : instance.first[rank + 1]]
    needed = _falls_for_room(instance, side, stage, rising, before)
    _choose_falls(own, since, stage, microbatch, rising, needed, before, falls_s)
    bank_s, soon_s = _pre_work(instance, side, stage, rising, before)
    if before.more[: len(own)].sum() == 0:
        soon_s = bank_s  # it all comes before the first fall
    fall_s, rest_s = np.inf, np.inf
    for at in range(len(own)):
        fall_s = min(fall_s, side.fall[own[at]])
        rest_s = min(rest_s, side.full[own[at]] - side.fall[own[at]])
    now, falls = soon_s, 0
    before.seen[:] = 0
    while True:
        chosen, chosen_s, way = -1, np.inf, 0
        for at in range(len(own)):
            number = before.seen[0, at]
            if number < before.risen[at] and rises_s[own[at], number] < chosen_s:
                chosen, chosen_s, way = at, rises_s[own[at], number], 0
            number = before.seen[1, at]
            if number < before.more[at]:
                when_s = _fall(own[at], stage, microbatch, rising, number, falls_s)
                if when_s < chosen_s:
                    chosen, chosen_s, way = at, when_s, 1
        if chosen < 0:
            return now
        now = max(now, chosen_s)
        if way == 0:
            now += side.rise[own[chosen]]
        else:
            forced = before.seen[1, chosen] < before.fallen[chosen]
            now += side.fall[own[chosen]] if forced else fall_s
            now += rest_s if falls < needed else 0.0
            now += bank_s - soon_s if falls == 0 else 0.0
            falls += 1
        before.seen[way, chosen] += 1


@kernel
def _fall(
    other: int,
    stage: int,
    microbatch: int,
    rising: bool,  # noqa: FBT001
    number: int,
    falls_s: Floats,
) -> float:
    """When a fall begins at the earliest, as far as it is known yet."""
    known = microbatch - 1 if rising or other <= stage else microbatch
    return float(falls_s[other, min(number, known)]) if known >= 0 else 0.0


@kernel
def _falls_for_room(
    instance: Instance,
    side: Side,
    stage: int,
    rising: bool,  # noqa: FBT001
    before: _Before,
) -> int:
    """How many falls must be over before there is room for all rises that come before this."""
    rank = instance.home[stage]
    begin, end = instance.first[rank], instance.first[rank + 1]
    held, most = side.kept[stage] if rising else 0.0, 0.0
    for at in range(begin, end):
        held += before.risen[at - begin] * side.kept[instance.own[at]]
        most = max(most, side.kept[instance.own[at]])
    over = held - instance.limit[rank]
    return int(np.ceil(over / most - ROUNDING)) if most > 0.0 and over > 0.0 else 0


@kernel
def _choose_falls(
    own: Indices,
    since: int,
    stage: int,
    microbatch: int,
    rising: bool,  # noqa: FBT001
    needed: int,
    before: _Before,
    falls_s: Floats,
) -> None:
    """Fill `more`: to the falls that come before in any case, those that can begin first."""
    total = 0
    for at in range(len(own)):
        before.more[at] = before.fallen[at]
        total += before.fallen[at]
    while total < needed:
        chosen, chosen_s = -1, np.inf
        for at in range(len(own)):
            when_s = _fall(own[at], stage, microbatch, rising, before.more[at], falls_s)
            if own[at] >= since and when_s < chosen_s:
                chosen, chosen_s = at, when_s
        before.more[chosen] += 1
        total += 1


@kernel
def _pre_work(
    instance: Instance,
    side: Side,
    stage: int,
    rising: bool,  # noqa: FBT001
    before: _Before,
) -> tuple[float, float]:
    """Seconds of pre that come before this, and how many of them there is room for at once."""
    rank = instance.home[stage]
    begin, end = instance.first[rank], instance.first[rank + 1]
    bank_s, least = side.pre[stage] if rising else 0.0, np.inf
    for at in range(begin, end):
        other = instance.own[at]
        bank_s += before.risen[at - begin] * side.pre[other]
        if side.pre[other] > 0.0:
            least = min(least, side.half[other] / side.pre[other])
    if bank_s <= 0.0 or least <= 0.0:
        return bank_s, bank_s
    return bank_s, min(bank_s, instance.limit[rank] / least)
