"""A schedule of few microbatches made into one of many, by repeating its middle.

Once the pipeline is full every period is like the one before it. So what was found for few
microbatches tells the order for many: its beginning, a block of microbatches from its middle
again and again, each time later by what the block takes, and its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fullbore.search.evaluate import evaluate
from fullbore.search.instance import Instance, work_for
from fullbore.search.tokens import Tokens

__all__ = ["stretched"]

Floats = npt.NDArray[np.float64]


def stretched(core: Instance, tokens: Tokens, instance: Instance) -> Iterator[Tokens]:
    """Programs for `instance` from programs for `core`, which has fewer microbatches.

    One for each block from the middle that may be repeated; they need not be legal.
    """
    times = _times(core, tokens)
    few, more = core.microbatches, instance.microbatches - core.microbatches
    for block in range(1, max(2, few // 3)):
        for begin in sorted({few // 3, (few - block) // 2, few // 2}):
            if begin + block < few:
                yield _repeated(instance, times, begin, block, more)


def _times(core: Instance, tokens: Tokens) -> Floats:
    """When each token runs: [S, 4, M] by stage, kind and microbatch, infinite for what does not."""
    work = work_for(core)
    evaluate(core, tokens.program, tokens.count, work)
    times = np.full((core.stages, 4, core.microbatches), np.inf)
    for rank in range(core.ranks):
        program = tokens.program[rank, : tokens.count[rank]]
        kind, stage = program & 3, program >> 2
        start_s, number = work.start_s[rank, : len(program)], work.number[rank, : len(program)]
        own = kind < 3
        times[stage[own], kind[own], number[own]] = start_s[own]
        for s in np.unique(stage).tolist():
            weights = start_s[(stage == s) & (kind == 3)]
            times[s, 3, np.flatnonzero(np.isfinite(times[s, 2]))[: len(weights)]] = weights
    return times


def _repeated(instance: Instance, times: Floats, begin: int, block: int, more: int) -> Tokens:
    """Microbatches 0 .. begin, then `more` made of the block, then the rest, later by as much."""
    few = times.shape[2]
    step = times[:, :3, begin + block] - times[:, :3, begin]
    period_s = float(np.max(step, where=np.isfinite(step), initial=0.0))
    turn, within = np.divmod(np.arange(more), block)
    source = np.concatenate([np.arange(begin), begin + within, np.arange(begin, few)])
    later = np.concatenate([np.zeros(begin), turn, np.full(few - begin, more / block)])
    all_s = times[:, :, source] + later * period_s
    made = Tokens.empty(instance)
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        token = np.repeat(own[:, None] * 4 + np.arange(4), len(source), axis=1).ravel()
        start_s = all_s[own].ravel()
        order = np.argsort(start_s, kind="stable")[: int(np.isfinite(start_s).sum())]
        made.program[rank, : len(order)] = token[order]
        made.count[rank] = len(order)
    return made
