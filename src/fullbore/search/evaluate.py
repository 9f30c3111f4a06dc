"""When every token of a set of programs runs: the simulator's rules, on the search's arrays.

The same arithmetic in the same order as `fullbore.sim`, so both give the same floats (tests hold
them to it); messages overlap with computation. A search asks this a million times about programs
that differ little. So an evaluation may go on from where a known one differs for the first time
(`resume`), and gives up once a rank has idled for longer than it may.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel

__all__ = ["copy_changes", "evaluate", "is_legal", "objective", "resume"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

_ROUNDING = 1e-12  # sums in another order may differ by this share


@kernel
def evaluate(instance: Instance, program: Tokens, count: Indices, work: Work) -> bool:
    """Fill `work` with the times of all tokens; False where ranks wait for one another for ever.

    program [P, L]: tokens. count [P]: how many of them each rank has. Programs must be legal.
    """
    work.from_position[:] = 0
    work.from_done[:] = 0
    work.clock_s[:] = 0.0
    work.link_free_s[:] = 0.0
    return _run(instance, program, count, work, np.inf, False)


@kernel
def resume(
    instance: Instance,
    program: Tokens,
    count: Indices,
    work: Work,
    rank: int,
    index: int,
    most_s: float,
    spans: bool,  # noqa: FBT001 (numba has no keyword-only)
) -> bool:
    """Evaluate programs of which `work` knows all but what follows from `index` of `rank` on.

    False too where the objective would be more than most_s; then `work` holds what it holds.
    Needs the ranks' `busy_s`.
    """
    duration_s, start_s, first = instance.duration_s, work.start_s, instance.first
    work.link_free_s[:] = 0.0
    since_s = 0.0
    if index > 0:
        since_s = start_s[rank, index - 1] + duration_s[program[rank, index - 1]]
    for r in range(instance.ranks):
        at = index
        if r != rank:
            at = int(np.searchsorted(start_s[r, : count[r]], since_s))
        work.from_position[r] = at
        work.clock_s[r] = 0.0
        if at > 0:
            work.clock_s[r] = start_s[r, at - 1] + duration_s[program[r, at - 1]]
        for own in range(first[r], first[r + 1]):
            stage = instance.own[own]
            for way in range(2):
                done = np.searchsorted(work.place[way, stage], at)
                work.from_done[way, stage] = done
                channel = instance.link[way, stage]
                if done > 0 and channel >= 0:
                    left_s = work.sent_s[way, stage, done - 1]
                    work.link_free_s[channel] = max(work.link_free_s[channel], left_s)
    return _run(instance, program, count, work, most_s, spans)


@kernel
def _run(
    instance: Instance,
    program: Tokens,
    count: Indices,
    work: Work,
    most_s: float,
    spans: bool,  # noqa: FBT001
) -> bool:
    """Let every rank go on until it waits, and wake it when what it waits for is made."""
    done, sent_s, place, start_s = work.done, work.sent_s, work.place, work.start_s
    link_free_s, position, clock_s = work.link_free_s, work.position, work.clock_s
    number, idle_s, awaited, runnable = work.number, work.idle_s, work.awaited, work.runnable
    home, link, duration_s, busy_s = instance.home, instance.link, instance.duration_s, work.busy_s
    lead_s, occupancy_s, hop_s = instance.lead_s, instance.occupancy_s, instance.hop_s
    last, waiting = instance.stages - 1, len(position)
    done[:2] = work.from_done
    position[:] = work.from_position
    awaited[:] = -1
    for rank in range(waiting):
        runnable[rank] = waiting - 1 - rank
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        now, index, stop = clock_s[rank], position[rank], count[rank]
        idle = idle_s[rank, index - 1] if index > 0 else 0.0
        spare_s = most_s * (1.0 + _ROUNDING) - busy_s[rank] + lead_s  # a span has one fewer
        while index < stop:
            token = program[rank, index]
            stage, kind = token >> 2, token & 3
            way = 0 if kind == 0 else 1
            before = stage - 1 + 2 * way
            microbatch = done[way, stage]
            if kind != 3 and stage != way * last:
                if done[way, before] <= microbatch:
                    awaited[rank] = stage * 2 + way
                    break
                there = sent_s[way, before, microbatch]
                if link[way, before] >= 0:
                    there += hop_s
                if there > now:
                    if index > 0 or not spans:
                        idle += there - now
                        if idle > spare_s:
                            position[rank] = index
                            return False
                    now = there
            now += lead_s
            start_s[rank, index] = now
            now += duration_s[token]
            idle_s[rank, index] = idle
            if kind != 3:
                number[rank, index] = microbatch
                place[way, stage, microbatch] = index
                done[way, stage] = microbatch + 1
                left = now
                channel = link[way, stage]
                if channel >= 0:
                    left = max(now, link_free_s[channel]) + occupancy_s
                    link_free_s[channel] = left
                sent_s[way, stage, microbatch] = left
                after = stage + 1 - 2 * way
                if stage != (1 - way) * last and awaited[home[after]] == after * 2 + way:
                    awaited[home[after]] = -1
                    runnable[waiting] = home[after]
                    waiting += 1
            index += 1
        position[rank] = index
        clock_s[rank] = now
    return bool(np.all(position == count))


@kernel
def copy_changes(instance: Instance, made: Work, into: Work) -> None:
    """Bring another's results up to date with those of the last evaluation of `made`.

    Both must have been the same before it, but for what is not read.
    """
    for rank in range(instance.ranks):
        begin, end = made.from_position[rank], made.position[rank]
        into.start_s[rank, begin:end] = made.start_s[rank, begin:end]
        into.idle_s[rank, begin:end] = made.idle_s[rank, begin:end]
        into.number[rank, begin:end] = made.number[rank, begin:end]
    into.clock_s[:] = made.clock_s
    for way in range(2):
        for stage in range(instance.stages):
            begin, end = made.from_done[way, stage], made.done[way, stage]
            into.sent_s[way, stage, begin:end] = made.sent_s[way, stage, begin:end]
            into.place[way, stage, begin:end] = made.place[way, stage, begin:end]


@kernel
def objective(work: Work, spans: bool) -> float:  # noqa: FBT001
    """The makespan, or the longest span of one rank, after an evaluation."""
    worst = 0.0
    for rank in range(len(work.clock_s)):
        begin = work.start_s[rank, 0] if spans else 0.0
        worst = max(worst, work.clock_s[rank] - begin)
    return worst


@kernel
def is_legal(instance: Instance, program: Tokens, count: Indices, work: Work, rank: int) -> bool:
    """Whether a rank's program is within memory, with every F before its backward before its W.

    Fills the rank's `busy_s`, and `live`, `flying` and `pending` as far as it is.
    """
    done, split, rise, change = work.done, work.split, instance.rise, instance.change
    duration_s, lives, flying, pending = instance.duration_s, work.live, work.flying, work.pending
    for at in range(instance.first[rank], instance.first[rank + 1]):
        done[:, instance.own[at]] = 0
        split[instance.own[at]] = 0
    live, limit, busy_s = 0.0, instance.limit[rank], instance.lead_s * count[rank]
    for index in range(count[rank]):
        token = program[rank, index]
        stage, kind = token >> 2, token & 3
        lives[rank, index] = live
        flying[rank, index] = done[0, stage] - done[1, stage]
        pending[rank, index] = split[stage] - done[2, stage]
        busy_s += duration_s[token]
        if live + rise[token] > limit:
            return False
        live += change[token]
        if kind == 0:
            done[0, stage] += 1
        elif kind == 3:
            done[2, stage] += 1
            if pending[rank, index] < 1:
                return False
        else:
            done[1, stage] += 1
            split[stage] += kind - 1
            if flying[rank, index] < 1:
                return False
    work.busy_s[rank] = busy_s
    return True
