"""One rank's program from its order of forwards, its order of backwards, and a warm-up count.

1F1B and interleaved 1F1B differ in nothing else: some forwards first, then forward and backward
in turn, then the backwards that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Program

__all__ = ["Order", "one_forward_one_backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Stages and microbatches [n] of one rank, in the order in which it takes them."""

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]


def one_forward_one_backward(*, forward: Order, backward: Order, warmup: int) -> Program:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards.

    Both orders have the same length n, and 0 <= warmup <= n.

        warmup = 2, n = 4:   F F | F B F B | B B
    """
    count = len(forward.stage)
    step = np.arange(count)
    paired = count - warmup
    place = np.empty(2 * count, dtype=np.int64)
    place[:count] = np.where(step < warmup, step, 2 * step - warmup)
    place[count:] = np.where(step < paired, warmup + 2 * step + 1, count + step)
    kind, stage, microbatch = (
        np.empty(2 * count, dtype=np.int8),
        np.empty(2 * count, dtype=np.int32),
        np.empty(2 * count, dtype=np.int32),
    )
    kind[place] = np.repeat([np.int8(Kind.F), np.int8(Kind.B)], count)
    stage[place] = np.concatenate([forward.stage, backward.stage])
    microbatch[place] = np.concatenate([forward.microbatch, backward.microbatch])
    return Program(kind=kind, stage=stage, microbatch=microbatch)
