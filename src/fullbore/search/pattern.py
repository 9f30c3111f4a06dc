"""Steady flows: one microbatch's times, repeated every period, that never meet on a rank.

Where memory is tight, what counts is that a microbatch passes through all stages, and back, with
hardly a wait, since it holds memory all the while. So a chain of F and backwards is laid out action
by action, each at the first time at which its rank is free in every period (as compilers lay out
the body of a loop: modulo scheduling), and W goes where room is left. Waits put in at chosen places
steer it; they are searched, for the shortest chain that keeps within memory.

All microbatches follow, a period apart; each rank's program is their order in time. The idea of a
block that repeats, whose actions' lifetimes add up to the memory, is from Qi et al., 2024,
https://arxiv.org/abs/2405.15362.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance
from fullbore.search.jit import kernel
from fullbore.search.tokens import Tokens

__all__ = ["repeated", "settle"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_SAME = 1e-9  # of a period: ends and starts closer than this follow each other


def repeated(instance: Instance, times_s: Floats, period_s: float) -> Tokens:
    """The programs of all microbatches, each a period after the one before it.

    times_s [3, S]: when F, the backward and W of microbatch 0 begin.
    """
    tokens = Tokens.empty(instance)
    kinds = (0, 2, 3) if instance.splits else (0, 1)
    shift_s = period_s * np.arange(instance.microbatches)
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        token = np.concatenate([own * 4 + kind for kind in kinds])
        start_s = np.concatenate([times_s[row, own] for row in range(len(kinds))])
        all_s = (start_s[:, None] + shift_s[None, :]).ravel()
        order = np.argsort(all_s, kind="stable")
        program = np.repeat(token, instance.microbatches)[order]
        tokens.program[rank, : len(program)] = program
        tokens.count[rank] = len(program)
    return tokens


@kernel
def settle(
    instance: Instance,
    period_s: float,
    chunk: Indices,  # [S] which of its rank's stages each one is
    waits_s: Floats,  # in and out [3, S]: waits before F, the backward and W
    times_s: Floats,  # out [3, S]
    moves: int,
) -> float:
    """Search the waits; by how much the ranks exceed their limits with the best, or 0.

    Fewer seconds of chain are better among those within memory; less memory before that. The
    first third of the moves draws waits that are the same for all stages of a chunk; the others
    change the best ones, in a chunk or here and there.
    """
    taken_s = np.zeros((instance.ranks, 3 * instance.stages, 2))
    taken = np.zeros(instance.ranks, dtype=np.int64)
    tried_s, laid_s, now_s = waits_s.copy(), times_s.copy(), waits_s.copy()
    scale_s = instance.duration_s.max()
    best, cost_now = np.inf, np.inf
    best_excess = np.inf
    for number in range(moves):
        tried_s[:] = now_s
        _vary(tried_s, chunk, scale_s, number, moves)
        _lay(instance, period_s, tried_s, laid_s, taken_s, taken)
        excess = _excess(instance, period_s, laid_s)
        cost = (laid_s[1, 0] + laid_s[2].mean() * 0.05) / period_s + excess * 20.0
        heat = 0.3 * (1.0 - number / moves) ** 2 + 1e-9
        if cost <= cost_now or np.random.random() < np.exp((cost_now - cost) / heat):
            cost_now = cost
            now_s[:] = tried_s
        if cost <= best:
            best, best_excess = cost, excess
            waits_s[:] = tried_s
            times_s[:] = laid_s
        if number == moves // 3:
            cost_now = best
            now_s[:] = waits_s
    return best_excess


@kernel
def _vary(waits_s: Floats, chunk: Indices, scale_s: float, number: int, moves: int) -> None:
    """Other waits: of a chunk on one way, or of one action; all of them at first."""
    chunks = chunk.max() + 1
    if number == 0:
        return
    rows = 2 * chunks if number < moves // 3 else 1
    for change in range(rows):
        row = change % 2 if rows > 1 else np.random.randint(3)
        of = change // 2 if rows > 1 else np.random.randint(chunks)
        luck = np.random.random()
        wait_s = 0.0 if luck < 0.4 else scale_s * 2 * (luck - 0.4)
        alone = -1
        if rows == 1 and np.random.random() < 0.8:
            alone = np.random.randint(len(chunk))
        for stage in range(len(chunk)):
            if stage == alone or (alone < 0 and chunk[stage] == of):
                waits_s[row, stage] = wait_s


@kernel
def _lay(
    instance: Instance,
    period_s: float,
    waits_s: Floats,
    times_s: Floats,
    taken_s: Floats,
    taken: Indices,
) -> None:
    """The times of microbatch 0: up, down, then the weight gradients."""
    taken[:] = 0
    home, link, lead_s = instance.home, instance.link, instance.lead_s
    now = 0.0
    for way in range(2):
        for at in range(instance.stages):
            stage = at if way == 0 else instance.stages - 1 - at
            kind = 0 if way == 0 else (2 if instance.splits else 1)
            takes_s = instance.duration_s[stage * 4 + kind] + lead_s
            rank = home[stage]
            now += waits_s[way, stage]
            now = _free(taken_s[rank], taken[rank], now, takes_s, period_s)
            times_s[way, stage] = now
            taken_s[rank, taken[rank], 0] = now % period_s
            taken_s[rank, taken[rank], 1] = takes_s
            taken[rank] += 1
            now += takes_s
            if link[way, stage] >= 0:
                now += instance.occupancy_s + instance.hop_s
    if not instance.splits:
        times_s[2] = times_s[1]
        return
    for stage in range(instance.stages - 1, -1, -1):
        rank = home[stage]
        takes_s = instance.duration_s[stage * 4 + 3] + lead_s
        now = times_s[1, stage] + instance.duration_s[stage * 4 + 2] + lead_s + waits_s[2, stage]
        now = _free(taken_s[rank], taken[rank], now, takes_s, period_s)
        times_s[2, stage] = now
        taken_s[rank, taken[rank], 0] = now % period_s
        taken_s[rank, taken[rank], 1] = takes_s
        taken[rank] += 1


@kernel
def _free(taken_s: Floats, taken: int, now: float, takes_s: float, period_s: float) -> float:
    """The first time from now on when nothing else runs in any period; now if there is none."""
    at, same_s = now, _SAME * period_s
    for _ in range(taken + 1):
        moved = False
        for other in range(taken):
            after_s = (at - taken_s[other, 0]) % period_s  # since the other one began
            if after_s < taken_s[other, 1] - same_s:
                at += taken_s[other, 1] - after_s
                moved = True
            elif period_s - after_s < takes_s - same_s:
                at += period_s - after_s + taken_s[other, 1]
                moved = True
        if not moved:
            return at
        if at - now > 2 * period_s:
            break
    return now


@kernel
def _excess(instance: Instance, period_s: float, times_s: Floats) -> float:
    """How much more than their limits the ranks hold at their worst moments, as a share, summed."""
    total = 0.0
    kind = 2 if instance.splits else 1
    for rank in range(instance.ranks):
        begin, end, worst = instance.first[rank], instance.first[rank + 1], 0.0
        for at in range(begin, end):
            for row in range(2):
                moment_s = times_s[row, instance.own[at]]
                here = instance.own[at] * 4 + (0 if row == 0 else kind)
                live = instance.rise[here] - instance.change[here] * (row == 0)
                for other in range(begin, end):
                    stage = instance.own[other]
                    live += _held(instance, period_s, times_s, stage, moment_s)
                worst = max(worst, live / instance.limit[rank] - 1.0)
        total += worst
    return total


@kernel
def _held(
    instance: Instance, period_s: float, times_s: Floats, stage: int, moment_s: float
) -> float:
    """What a rank holds for a stage: of each F that has begun, of all else that has ended."""
    lead_s, same = instance.lead_s, _SAME
    token = stage * 4
    begun = np.floor((moment_s - times_s[0, stage]) / period_s + same)
    kind = 2 if instance.splits else 1
    end_s = times_s[1, stage] + instance.duration_s[token + kind] + lead_s
    held = instance.change[token] * begun
    held += instance.change[token + kind] * np.floor((moment_s - end_s) / period_s + same)
    if instance.splits:
        end_s = times_s[2, stage] + instance.duration_s[token + 3] + lead_s
        held += instance.change[token + 3] * np.floor((moment_s - end_s) / period_s + same)
    return float(held)
