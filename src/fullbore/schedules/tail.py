"""The cool-down of a repeated pattern: slot by slot, each rank does the first thing that is ready.

Of what is ready, the one that the plan has first is taken, if memory allows it, and a W where there
is nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["ADDS", "FREE", "F_DOWN", "F_UP", "I_DOWN", "I_UP", "W", "finish"]

Words = npt.NDArray[np.int8]

# What a rank of a V can do in a slot, in the order in which a microbatch comes by: forwards of the
# stage on the way down and of that on the way up, then their I, the latter's first.
F_DOWN, F_UP, I_UP, I_DOWN, W, FREE = range(6)

# What each adds to the activations that a rank holds.
ADDS = np.array([1, 1, 0, 0, -1, 0])


def finish(rows: Sequence[Words], *, start: int, microbatches: int, most: int) -> list[Words]:
    """The words of each rank, without free slots: those before `start` as they stand, then anew.

    rows: the plan, a rank each, in which every word occurs as often as it must.
    """
    ranks = [_Rank(row, start, microbatches, most) for row in rows]
    slot, left = start, sum(rank.left for rank in ranks)
    while left:
        chosen = [rank.choose(ranks, number, slot) for number, rank in enumerate(ranks)]
        for rank, word in zip(ranks, chosen, strict=True):
            if word != FREE:
                rank.do(word, slot)
                left -= 1
        slot += 1
    return [np.array(rank.words, dtype=np.int8) for rank in ranks]


class _Rank:
    def __init__(self, row: Words, start: int, microbatches: int, most: int) -> None:
        self._planned = [np.flatnonzero(row == word).tolist() for word in range(W)]
        self._microbatches, self._most = microbatches, most
        self.slots = [np.flatnonzero(row[:start] == word).tolist() for word in range(FREE)]
        self.words: list[int] = row[:start][row[:start] != FREE].tolist()
        self._live = int(ADDS[self.words].sum())
        self.left = 6 * microbatches - len(self.words)

    def choose(self, ranks: Sequence[_Rank], number: int, slot: int) -> int:
        """What this rank, the number-th, does in a slot."""
        best, planned = FREE, 0
        for word in (F_DOWN, F_UP, I_UP, I_DOWN):
            at = len(self.slots[word])
            if at == self._microbatches or (ADDS[word] > 0 and self._live >= self._most):
                continue
            if (best == FREE or self._planned[word][at] < planned) and _is_ready(
                ranks, number, word, slot
            ):
                best, planned = word, self._planned[word][at]
        waiting = len(self.slots[I_UP]) + len(self.slots[I_DOWN]) - len(self.slots[W])
        return W if best == FREE and waiting else best

    def do(self, word: int, slot: int) -> None:
        """Put it there."""
        self.slots[word].append(slot)
        self.words.append(word)
        self._live += int(ADDS[word])

    def has_done(self, word: int, number: int, before: int) -> bool:
        """Whether the word of this microbatch stands before a slot."""
        slots = self.slots[word]
        return len(slots) > number and slots[number] < before


def _is_ready(ranks: Sequence[_Rank], number: int, word: int, slot: int) -> bool:
    """Whether what the rank's next such word needs is done."""
    microbatch = len(ranks[number].slots[word])
    if word != F_DOWN and not ranks[number].has_done(word - 1, microbatch, slot):
        return False
    neighbour = number - 1 if word in (F_DOWN, I_UP) else number + 1
    outside = not 0 <= neighbour < len(ranks)
    return outside or ranks[neighbour].has_done(word, microbatch, slot)
