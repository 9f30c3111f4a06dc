"""Local search on what a schedule takes when times jitter: a high quantile over fixed samples.

The samples are drawn once, a factor for each action in each (`fullbore.sim.jitter`), so that
programs are compared under the same luck. A move is judged by what it promises with no jitter
first, then sample by sample, and given up once too many of them are over what is allowed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.evaluate import copy_changes, is_legal, objective, resume
from fullbore.search.improve import begin, look, propose, put, take_back
from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel
from fullbore.search.moves import can_shift, clip, promise

__all__ = ["harden", "quantile"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

_MARGIN = 0.005  # how much worse than now, with no jitter, a move may promise to be


@kernel
def quantile(
    instance: Instance,
    program: Tokens,
    count: Indices,
    spans: bool,  # noqa: FBT001 (numba has no keyword-only)
    factors: Floats,  # [samples, 4, S, M] by kind, stage and microbatch
    share: float,
    allowed_s: float,
    work: Work,  # scratch
) -> float:
    """The objective that this share of the samples does not exceed (linear between two of them).

    Infinite once it is sure to be more than allowed_s, or where programs never end.
    """
    samples = len(factors)
    values = np.zeros(samples)
    place = share * (samples - 1)
    low = int(np.floor(place))
    over = 0
    for sample in range(samples):
        values[sample] = _sampled(instance, program, count, spans, factors[sample], work)
        over += values[sample] > allowed_s
        if over > samples - 1 - low:
            return np.inf
    values.sort()
    high = min(low + 1, samples - 1)
    return float(values[low] + (place - low) * (values[high] - values[low]))


@kernel
def _sampled(
    instance: Instance,
    program: Tokens,
    count: Indices,
    spans: bool,  # noqa: FBT001
    factor: Floats,  # [4, S, M]
    work: Work,
) -> float:
    """The objective of one sample; infinite where ranks wait for one another for ever."""
    done, sent_s, start_s, clock_s = work.done, work.sent_s, work.start_s, work.clock_s
    link_free_s, position, awaited = work.link_free_s, work.position, work.awaited
    home, link, runnable, duration_s = (
        instance.home,
        instance.link,
        work.runnable,
        instance.duration_s,
    )
    lead_s, occupancy_s, hop_s = instance.lead_s, instance.occupancy_s, instance.hop_s
    last, waiting = instance.stages - 1, len(position)
    done[:], position[:], clock_s[:], link_free_s[:], awaited[:] = 0, 0, 0.0, 0.0, -1
    for rank in range(waiting):
        runnable[rank] = waiting - 1 - rank
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        now, index = clock_s[rank], position[rank]
        while index < count[rank]:
            token = program[rank, index]
            stage, kind = token >> 2, token & 3
            way = (kind + 1) >> 1  # rows of `done`: F, backward, W
            before, microbatch = stage - 1 + 2 * way, done[way, stage]
            if way < 2 and stage != way * last:
                if done[way, before] <= microbatch:
                    awaited[rank] = stage * 2 + way
                    break
                there = sent_s[way, before, microbatch]
                now = max(now, there + hop_s if link[way, before] >= 0 else there)
            now += lead_s
            start_s[rank, index] = now
            now += duration_s[token] * factor[kind, stage, microbatch]
            done[way, stage] = microbatch + 1
            index += 1
            if way == 2:
                continue
            left, channel, after = now, link[way, stage], stage + 1 - 2 * way
            if channel >= 0:
                left = max(now, link_free_s[channel]) + occupancy_s
                link_free_s[channel] = left
            sent_s[way, stage, microbatch] = left
            if stage != (1 - way) * last and awaited[home[after]] == after * 2 + way:
                awaited[home[after]] = -1
                runnable[waiting] = home[after]
                waiting += 1
        position[rank], clock_s[rank] = index, now
    return objective(work, spans) if np.all(position == count) else np.inf


@kernel
def harden(
    instance: Instance,
    program: Tokens,  # in and out [P, L]: the programs that the walk stands at
    count: Indices,  # in and out [P]
    spans: bool,  # noqa: FBT001
    temperature_s: float,
    moves: int,
    factors: Floats,
    share: float,
    best_program: Tokens,  # in and out: the best ones seen
    best_count: Indices,
    best_s: float,
    work: Work,  # scratch: what is known of `program` without jitter
    trial: Work,  # scratch
    sampled: Work,  # scratch
) -> float:
    """Try so many moves; the quantile of the best programs (best_s if none were better)."""
    path = np.zeros((instance.ranks * program.shape[1], 2), dtype=np.int64)
    ends_s, move = np.zeros(program.shape[1]), np.zeros(4, dtype=np.int64)
    begin(instance, program, count, work, trial)
    steps = look(instance, program, count, spans, work, path)
    value_s = quantile(instance, program, count, spans, factors, share, np.inf, sampled)
    nominal_s = objective(work, spans)
    for _ in range(moves):
        propose(instance, program, count, path, steps, move)
        rank, here, change = move[0], move[1], move[3]
        if change == 0:
            move[2] = clip(program, rank, here, move[2])
            there = move[2]
            if here == there or not can_shift(instance, program, work, rank, here, there):
                continue
            promised_s = promise(instance, program, count, work, rank, here, there, ends_s)
            if promised_s > nominal_s * (1 + _MARGIN):
                continue
        allowed_s = value_s - temperature_s * np.log(1.0 - np.random.random())
        put(program, count, move)
        runs = is_legal(instance, program, count, trial, rank)
        now_s = np.inf
        if runs:
            now_s = quantile(instance, program, count, spans, factors, share, allowed_s, sampled)
        if now_s > allowed_s:
            take_back(program, count, move)
            continue
        resume(instance, program, count, trial, rank, min(here, move[2]), np.inf, spans)
        copy_changes(instance, trial, work)
        is_legal(instance, program, count, work, rank)
        steps = look(instance, program, count, spans, work, path)
        value_s, nominal_s = now_s, objective(work, spans)
        if value_s < best_s:
            best_s = value_s
            best_program[:] = program
            best_count[:] = count
    return best_s
