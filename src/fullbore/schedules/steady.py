"""One rank's program from its order of forwards, its order of backwards, and a warm-up count.

1F1B, eager 1F1B, both kinds of interleaving and ZB-H1 and ZB-H2 differ in nothing else: some
forwards first, then forward and backward in turn, then the backwards that are left. The last four
split the backward, and say how many I run ahead of their W.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Program

__all__ = [
    "Order",
    "Turns",
    "every_microbatch",
    "groups",
    "one_forward_one_backward",
    "split_backwards",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Stages and microbatches [n] of one rank, in the order in which it takes them."""

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]


def every_microbatch(*, stage: int, microbatches: int) -> Order:
    """All microbatches of one stage, in order."""
    return Order(
        stage=np.full(microbatches, stage, dtype=np.int32),
        microbatch=np.arange(microbatches, dtype=np.int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """In which order a rank of a looped placement takes its stages and microbatches [n].

    chunk: which of the rank's v stages, 0..v-1, forwards; backwards take v-1-chunk.
    """

    chunk: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    virtual_stages: int

    def forward(self, rank: int, ranks: int) -> Order:
        """The order of a rank's forwards."""
        return Order(stage=self.chunk * ranks + rank, microbatch=self.microbatch)

    def backward(self, rank: int, ranks: int) -> Order:
        """The order of a rank's backwards: its stages from the last one down."""
        chunk = self.virtual_stages - 1 - self.chunk
        return Order(stage=chunk * ranks + rank, microbatch=self.microbatch)


def groups(*, microbatches: int, virtual_stages: int, group: int) -> Turns:
    """Groups of G microbatches, each through the first stage, then the second, ...; the last
    group may be short.
    """
    step = np.arange(microbatches * virtual_stages, dtype=np.int32)
    first = step // (group * virtual_stages) * group  # microbatch of the step's group
    size = np.minimum(group, microbatches - first)
    inside = step - first * virtual_stages
    return Turns(
        chunk=inside // size, microbatch=first + inside % size, virtual_stages=virtual_stages
    )


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


def split_backwards(program: Program, *, ahead: int) -> Program:
    """Every B as I, and its W behind the I of the backward that comes `ahead` backwards later.

    The last W stand at the end of the program.

        ahead = 1:   F F B F B B   ->   F F I F I W I W W
    """
    whole = np.flatnonzero(program.kind == Kind.B)
    behind = np.append(whole[ahead:], np.full(min(ahead, len(whole)), len(program)))
    place = np.concatenate([np.arange(len(program)), behind])
    source = np.concatenate([np.arange(len(program)), whole])
    order = np.argsort(place, kind="stable")
    kind = np.where(program.kind == Kind.B, np.int8(Kind.I), program.kind)[source]
    kind[len(program) :] = Kind.W
    return Program(
        kind=kind[order],
        stage=program.stage[source][order],
        microbatch=program.microbatch[source][order],
    )
