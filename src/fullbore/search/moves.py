"""Moves of one token within its rank's program: whether they are legal, and what they promise.

Nine moves of ten make things worse. Most of those show without an evaluation: the chains that go
through the tokens between the old place and the new one are new, and they are as long as the way up
to each of these tokens, and from each to the end, which are known from before the move. This is
how job shops are searched (Balas, Vazacopoulos, 1998); what other ranks do meanwhile is taken to
be as before, so it is a promise and no proof.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel

__all__ = ["can_shift", "clip", "fill_tails", "promise"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@kernel
def clip(program: Tokens, rank: int, here: int, there: int) -> int:
    """The place nearest to `there` without passing a token of the same kind and stage."""
    token = program[rank, here]
    step = 1 if there > here else -1
    index = here
    while index != there and program[rank, index + step] != token:
        index += step
    return index


@kernel
def can_shift(
    instance: Instance, program: Tokens, work: Work, rank: int, here: int, there: int
) -> bool:
    """Whether the token at `here` may stand at `there` (see `clip`); `work` knows the program."""
    live, flying, pending = work.live, work.flying, work.pending
    rise, change, limit = instance.rise, instance.change, instance.limit[rank]
    token = program[rank, here]
    stage, kind, delta = token >> 2, token & 3, change[token]
    if there > here:
        for index in range(here + 1, there + 1):
            other = program[rank, index]
            if live[rank, index] - delta + rise[other] > limit:
                return False
            if other >> 2 == stage:
                to = other & 3
                if kind == 0 and (to == 1 or to == 2) and flying[rank, index] < 2:
                    return False
                if kind == 2 and to == 3 and pending[rank, index] < 2:
                    return False
        after = program[rank, there]
        return bool(live[rank, there] - delta + change[after] + rise[token] <= limit)
    flies, waits = flying[rank, here], pending[rank, here]
    for index in range(here - 1, there - 1, -1):
        other = program[rank, index]
        if live[rank, index] + delta + rise[other] > limit:
            return False
        if other >> 2 == stage:
            flies, waits = flying[rank, index], pending[rank, index]
            if (kind == 1 or kind == 2) and flies < 1:
                return False
            if kind == 3 and waits < 1:
                return False
    return bool(live[rank, there] + rise[token] <= limit)


@kernel
def fill_tails(
    instance: Instance,
    program: Tokens,
    count: Indices,
    work: Work,
    spans: bool,  # noqa: FBT001 (numba has no keyword-only)
) -> None:
    """Fill `tail_s`, from the last tokens back, after an evaluation."""
    ranks, width = instance.ranks, program.shape[1]
    home, link, place, number = instance.home, instance.link, work.place, work.number
    tail_s, awaited, runnable, position = work.tail_s, work.awaited, work.runnable, work.position
    lead_s, duration_s, last = instance.lead_s, instance.duration_s, instance.stages - 1
    delay_s = instance.occupancy_s + instance.hop_s
    for rank in range(ranks):
        position[rank] = count[rank] - 1
        awaited[rank] = -1
        runnable[rank] = rank
    waiting = ranks
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        index = position[rank]
        while index >= 0:
            token = program[rank, index]
            stage, kind = token >> 2, token & 3
            way = 0 if kind == 0 else 1
            if index == count[rank] - 1:
                tail = -work.start_s[rank, 0] if spans else 0.0
            else:
                tail = lead_s + duration_s[program[rank, index + 1]] + tail_s[rank, index + 1]
            if kind != 3 and link[way, stage] >= 0:
                after = stage + 1 - 2 * way
                other = home[after]
                at = place[way, after, number[rank, index]]
                if position[other] >= at:
                    awaited[rank] = other * width + at
                    break
                beyond_s = duration_s[program[other, at]] + tail_s[other, at]
                tail = max(tail, delay_s + lead_s + beyond_s)
            tail_s[rank, index] = tail
            position[rank] = index - 1
            if kind != 3 and stage != way * last:
                other = home[stage - 1 + 2 * way]
                if awaited[other] == rank * width + index:
                    awaited[other] = -1
                    runnable[waiting] = other
                    waiting += 1
            index -= 1


@kernel
def promise(
    instance: Instance,
    program: Tokens,
    count: Indices,
    work: Work,
    rank: int,
    here: int,
    there: int,
    ends_s: Floats,  # scratch [L]
) -> float:
    """What the objective would be at least, if other ranks went on as before."""
    link, duration_s, lead_s = instance.link, instance.duration_s, instance.lead_s
    sent_s, number, tail_s = work.sent_s, work.number, work.tail_s
    low, high = min(here, there), max(here, there)
    step = 1 if there > here else -1
    now = 0.0
    if low > 0:
        now = work.start_s[rank, low - 1] + duration_s[program[rank, low - 1]]
    for index in range(low, high + 1):
        old = here if index == there else index + step
        token = program[rank, old]
        way = 0 if token & 3 == 0 else 1
        before = (token >> 2) - 1 + 2 * way
        if token & 3 != 3 and before >= 0 and before < instance.stages:
            there_s = sent_s[way, before, number[rank, old]]
            if link[way, before] >= 0:
                there_s += instance.hop_s
            now = max(now, there_s)
        now += lead_s + duration_s[token]
        ends_s[index - low] = now
    if high == count[rank] - 1:
        tail = tail_s[rank, high]
    else:
        tail = lead_s + duration_s[program[rank, high + 1]] + tail_s[rank, high + 1]
    worst = -np.inf
    for index in range(high, low - 1, -1):
        old = here if index == there else index + step
        token = program[rank, old]
        way = 0 if token & 3 == 0 else 1
        stage = token >> 2
        if token & 3 != 3 and link[way, stage] >= 0:
            after = stage + 1 - 2 * way
            other, at = instance.home[after], work.place[way, after, number[rank, old]]
            beyond_s = duration_s[program[other, at]] + tail_s[other, at] + lead_s
            tail = max(tail, instance.occupancy_s + instance.hop_s + beyond_s)
        worst = max(worst, ends_s[index - low] + tail)
        tail += lead_s + duration_s[token]
    return float(worst)
