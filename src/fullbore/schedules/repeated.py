"""A schedule from one microbatch's pattern, repeated, with its ends pulled tight: V-Half and V-Min.

Slots are equally long and hold one F, I or W. A pattern says in which slot each rank runs the F
and I of microbatch 0; those of microbatch m run 6m slots later, and W fill slots that are left
free. That repeats for ever without a conflict, and holds as much as the pattern says. Only at both
ends slots stay free, so there actions are moved up as far as the memory limit allows: in the
warm-up each into the first free slot that keeps the plan within the limit (here), in the cool-down
whatever is ready, W last (`tail`). Source: Qi et al., 2024, "Pipeline Parallelism with Controllable
Memory", sections 3 and 4, https://arxiv.org/abs/2405.15362.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Placement, Schedule
from fullbore.schedules.phases import numbered
from fullbore.schedules.tail import ADDS, F_DOWN, FREE, I_DOWN, I_UP, W, finish

__all__ = ["Pattern", "repeated"]

Words = npt.NDArray[np.int8]
Pattern = Sequence[tuple[int, int, int, int]]
"""For each rank of a V the slots of F_DOWN, F_UP, I_UP and I_DOWN of microbatch 0."""

_PERIOD = 6
_KIND = np.array([Kind.F, Kind.F, Kind.I, Kind.I, Kind.W], dtype=np.int8)
_OWN = np.array([0, 1, 1, 0, 0])


def repeated(name: str, *, pattern: Pattern, microbatches: int, most: int) -> Schedule:
    """The schedule on a V that repeats this pattern.

    most: how many activations of one stage and microbatch a rank may hold, at least as many as
    the pattern itself does.
    """
    placement, first = Placement.v(ranks=len(pattern)), np.array(pattern)
    rows = [_plan(own, microbatches) for own in first]
    warm_until = int(first[0, I_DOWN])
    _pull_up(rows, until=warm_until, most=most)
    start = max(warm_until, int(first[0, F_DOWN]) + _PERIOD * (microbatches - 1) + 1)
    words = finish(rows, start=start, microbatches=microbatches, most=most)
    return Schedule(
        name=name,
        microbatches=microbatches,
        placement=placement,
        programs=tuple(
            numbered(kind=_KIND[row], own=_OWN[row], stages=placement.stages_of(rank))
            for rank, row in enumerate(words)
        ),
    )


def _plan(first: npt.NDArray[np.int64], microbatches: int) -> Words:
    """A rank's slots: the pattern repeated, and each W in the first one free after its I."""
    row = np.full(int(first.max()) + (_PERIOD + 2) * microbatches, FREE, dtype=np.int8)
    for word, slot in enumerate(first):
        row[slot + _PERIOD * np.arange(microbatches)] = word
    halves, free = np.flatnonzero((row == I_UP) | (row == I_DOWN)), np.flatnonzero(row == FREE)
    turn = np.arange(len(halves))
    row[free[np.maximum.accumulate(np.searchsorted(free, halves) - turn) + turn]] = W
    return row


class _Row:
    """A rank's slots in the making: which are taken, what is held in each, and what has gone by."""

    def __init__(self, words: Words, most: int) -> None:
        self.words, self._most = words, most
        self._taken = bytearray((words != FREE).tobytes())
        self._live = np.cumsum(ADDS[words])
        self._full = bytearray((self._live >= most).tobytes())
        self.slots: list[list[int]] = [[] for _ in range(FREE)]  # of each word, by microbatch
        self.halves: list[int] = []  # slots of all I

    def move(self, slot: int, after: int) -> None:
        """Move the word in this slot to the first free one behind `after`, if memory allows it."""
        word, first = int(self.words[slot]), after + 1
        if ADDS[word] > 0:
            first = max(first, self._full.rfind(1, first, slot) + 1)
        found = self._taken.find(0, first, slot)
        to = slot if found < 0 else found
        self._taken[slot], self._taken[to] = 0, 1
        self.words[slot], self.words[to] = FREE, word
        self._live[to:slot] += ADDS[word]
        self._full[to:slot] = (self._live[to:slot] >= self._most).tobytes()
        self.slots[word].append(to)
        if word in (I_UP, I_DOWN):
            insort(self.halves, to)


def _pull_up(words: list[Words], *, until: int, most: int) -> None:
    """Move up every word planned before a slot, in the order of the plan."""
    rows = [_Row(own, most) for own in words]
    planned = [
        (int(s), r) for r, own in enumerate(words) for s in np.flatnonzero(own[:until] < FREE)
    ]
    for slot, rank in sorted(planned):
        row, word = rows[rank], int(words[rank][slot])
        number = len(row.slots[word])
        after = row.slots[word][-1] if number else -1
        if word == W:
            after = max(after, row.halves[number])
        elif word != F_DOWN:
            after = max(after, row.slots[word - 1][number])
        neighbour = rank - 1 if word in (F_DOWN, I_UP) else rank + 1
        if word != W and 0 <= neighbour < len(rows):
            after = max(after, rows[neighbour].slots[word][number])
        row.move(slot, after)
