"""Runs the programs without time: every rank goes on until it needs what is not done yet.

Going on never takes anything away from another rank, so whatever order the ranks are tried in,
they get equally far: one greedy walk decides exactly whether a schedule can finish.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import FlatSchedule
from fullbore.verify.kernels import compiled, walk_programs

__all__ = ["Walk", "walk"]

Indices = npt.NDArray[np.int64]

COMPILE_FROM_ACTIONS = 300_000
"""From here on numba pays for its import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a walk did.

    order: the actions done [n], as flat indices, in an order in which they can happen.
    reached: the flat index at which each rank [P] stands; the end of its program where it has
    finished.
    """

    order: Indices
    reached: Indices


def walk(flat: FlatSchedule, needs: Indices) -> Walk:
    """Run all programs; needs[i] is the action of another rank that action i needs, or -1.

    What an action needs from its own rank must stand before it, and no two actions may need the
    same one. Linear in actions.
    """
    needing = np.flatnonzero(needs >= 0)
    needer, home = (np.full(len(needs), -1, dtype=np.int64) for _ in range(2))
    needer[needs[needing]] = flat.rank[needing]
    home[needing] = flat.rank[needs[needing]]
    ranks = len(flat.offsets) - 1
    arrays = {
        "offsets": flat.offsets,
        "needs": needs,
        "home": home,
        "needer": needer,
        "reached": flat.offsets[:-1].copy(),
        "order": np.full(len(needs), -1, dtype=np.int64),
        "awaited": np.full(ranks, -1, dtype=np.int64),
        "runnable": np.arange(ranks)[::-1].copy(),
    }
    if len(needs) >= COMPILE_FROM_ACTIONS:
        compiled(walk_programs)(**arrays)
        order, reached = arrays["order"], arrays["reached"]
    else:
        lists = {name: array.tolist() for name, array in arrays.items()}
        walk_programs(**lists)
        order, reached = (np.array(lists[name], dtype=np.int64) for name in ("order", "reached"))
    return Walk(order=order[order >= 0], reached=reached)
