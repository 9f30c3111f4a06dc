"""Programs that begin as the best ones do, and go on as the list scheduler would otherwise.

No one setting is right for a whole step: filling the pipeline asks for other rules than the steady
phase does, and draining it for others again. So the best programs are cut at some moment, and what
comes after it is laid out anew, with many settings in turn; what is better is kept, and cut again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.evaluate import evaluate, objective
from fullbore.search.explore import lay_out
from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel

__all__ = ["regrow"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

_TAIL = 0.02


@kernel
def regrow(
    instance: Instance,
    chain_s: Floats,
    chunk: Floats,
    period_s: float,
    settings: Floats,
    spans: bool,  # noqa: FBT001 (numba has no keyword-only)
    program: Tokens,  # in and out: the programs that are cut
    count: Indices,  # in and out
    enough_s: float,
    work: Work,  # scratch
    trial: Work,  # scratch
) -> float:
    """Try each setting after a cut; the objective of the best programs, which are left."""
    made, made_count = np.zeros_like(program), np.zeros_like(count)
    given_count = np.zeros_like(count)
    evaluate(instance, program, count, work)
    best_s = objective(work, spans)
    now_s = best_s + _TAIL * work.clock_s.mean()
    for number in range(len(settings)):
        cut_s = np.random.random() * best_s
        for rank in range(instance.ranks):
            given_count[rank] = np.searchsorted(work.start_s[rank, : count[rank]], cut_s)
        complete = lay_out(
            instance,
            chain_s,
            chunk,
            period_s,
            settings[number],
            made,
            made_count,
            program,
            given_count,
            trial,
        )
        if not complete or not evaluate(instance, made, made_count, trial):
            continue
        value_s = objective(trial, spans)
        then_s = value_s + _TAIL * trial.clock_s.mean()
        if then_s <= now_s:
            best_s, now_s = value_s, then_s
            program[:] = made
            count[:] = made_count
            evaluate(instance, program, count, work)
            if best_s <= enough_s:
                break
    return best_s
