"""When every token of a set of programs runs: the simulator's rules, on the search's arrays.

The same arithmetic in the same order as `fullbore.sim`, so both give the same floats (tests hold
them to it); messages overlap with computation. Only what a search asks a million times is here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel

__all__ = ["evaluate", "is_legal", "objective"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@kernel
def evaluate(instance: Instance, program: Tokens, count: Indices, work: Work) -> bool:
    """Fill `work` with the times of all tokens; False where ranks wait for one another for ever.

    program [P, L]: tokens. count [P]: how many of them each rank has. Programs must be legal.
    """
    done, ready_s, place, start_s = work.done, work.ready_s, work.place, work.start_s
    link_free_s, position, clock_s = work.link_free_s, work.position, work.clock_s
    number = work.number
    awaited, runnable = work.awaited, work.runnable
    home, link, duration_s = instance.home, instance.link, instance.duration_s
    lead_s, occupancy_s, hop_s = instance.lead_s, instance.occupancy_s, instance.hop_s
    last, waiting = instance.stages - 1, len(position)
    done[:] = 0
    link_free_s[:] = 0.0
    position[:] = 0
    clock_s[:] = 0.0
    awaited[:] = -1
    for rank in range(waiting):
        runnable[rank] = waiting - 1 - rank
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        now, index, stop = clock_s[rank], position[rank], count[rank]
        while index < stop:
            token = program[rank, index]
            stage, kind = token >> 2, token & 3
            if kind == 3:
                now += lead_s
                start_s[rank, index] = now
                now += duration_s[token]
                index += 1
                continue
            way = 0 if kind == 0 else 1
            step = 1 - 2 * way
            microbatch = done[way, stage]
            if stage != way * last:
                if done[way, stage - step] <= microbatch:
                    awaited[rank] = stage * 2 + way
                    break
                now = max(now, ready_s[way, stage, microbatch])
            now += lead_s
            start_s[rank, index] = now
            now += duration_s[token]
            number[rank, index] = microbatch
            place[way, stage, microbatch] = index
            done[way, stage] = microbatch + 1
            index += 1
            if stage != (1 - way) * last:
                usable = now
                channel = link[way, stage]
                if channel >= 0:
                    left = max(now, link_free_s[channel]) + occupancy_s
                    link_free_s[channel] = left
                    usable = left + hop_s
                ready_s[way, stage + step, microbatch] = usable
                other = home[stage + step]
                if awaited[other] == (stage + step) * 2 + way:
                    awaited[other] = -1
                    runnable[waiting] = other
                    waiting += 1
        position[rank] = index
        clock_s[rank] = now
    return bool(np.all(position == count))


@kernel
def objective(work: Work, spans: bool) -> float:  # noqa: FBT001 (numba has no keyword-only)
    """The makespan, or the longest span of one rank, after an evaluation."""
    worst = 0.0
    for rank in range(len(work.clock_s)):
        begin = work.start_s[rank, 0] if spans else 0.0
        worst = max(worst, work.clock_s[rank] - begin)
    return worst


@kernel
def is_legal(instance: Instance, program: Tokens, count: Indices, work: Work, rank: int) -> bool:
    """Whether a rank's program is within memory, with every F before its backward before its W."""
    done, split, rise, change = work.done, work.split, instance.rise, instance.change
    for at in range(instance.first[rank], instance.first[rank + 1]):
        done[:, instance.own[at]] = 0
        split[instance.own[at]] = 0
    live, limit = 0.0, instance.limit[rank]
    for index in range(count[rank]):
        token = program[rank, index]
        stage, kind = token >> 2, token & 3
        if live + rise[token] > limit:
            return False
        live += change[token]
        if kind == 0:
            done[0, stage] += 1
        elif kind == 3:
            done[2, stage] += 1
            if done[2, stage] > split[stage]:
                return False
        else:
            done[1, stage] += 1
            split[stage] += kind - 1
            if done[1, stage] > done[0, stage]:
                return False
    return True
