"""Runs the programs without time: every rank goes on until it needs what is not done yet.

Going on never takes anything away from another rank, so whatever order the ranks are tried in,
they get equally far: one greedy walk decides exactly whether a schedule can finish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import FlatSchedule

__all__ = ["Walk", "walk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a walk did.

    starts, stops: runs of flat indices start:stop, in an order in which all actions can happen.
    reached: for each rank [P] the flat index at which it stands; the end of its program where
    it has finished.
    """

    starts: list[int]
    stops: list[int]
    reached: list[int]

    def order(self) -> npt.NDArray[np.int64]:
        """All actions done [n], as flat indices in an order in which they can happen."""
        starts = np.array(self.starts, dtype=np.int64)
        lengths = np.array(self.stops, dtype=np.int64) - starts
        begins = np.cumsum(lengths) - lengths
        return np.repeat(starts - begins, lengths) + np.arange(lengths.sum())


def walk(flat: FlatSchedule, needs: npt.NDArray[np.int64]) -> Walk:
    """Run all programs; needs[i] is the action of another rank that action i needs, or -1.

    What an action needs from its own rank must stand before it. Linear in actions.
    """
    rank, need = flat.rank.tolist(), needs.tolist()
    reached, ends = flat.offsets[:-1].tolist(), flat.offsets[1:].tolist()
    waiting: dict[int, list[int]] = {}
    starts: list[int] = []
    stops: list[int] = []
    ready = list(range(len(ends)))[::-1]
    while ready:
        current = ready.pop()
        start = at = reached[current]
        while at < ends[current]:
            needed = need[at]
            if needed >= 0 and reached[rank[needed]] <= needed:
                waiting.setdefault(needed, []).append(current)
                break
            if at in waiting:
                ready.extend(waiting.pop(at))
            at += 1
        reached[current] = at
        if at > start:
            starts.append(start)
            stops.append(at)
    return Walk(starts=starts, stops=stops, reached=reached)
