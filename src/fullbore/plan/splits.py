"""How many layers each stage gets: the slowest stage as fast as possible, every rank within memory.

The embedding goes with the first layer, as the engine wants it; the head may be a stage by itself.
With one stage a rank the split is exact, with and without the limit (`cost.partition`). With
several, a rank's room is shared out evenly among its stages, so that a split that would need
unequal shares can be missed; whatever comes out is checked as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.cost.partition import partition, partition_within
from fullbore.plan.prices import Floats, Row

__all__ = ["Room", "balanced", "even", "joined", "within_room"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Room:
    """What stages of equal size may hold.

    home [S]: the rank of each stage. live: for each rank the numbers of microbatches of a stage
    that it holds at once, between F and the backward, and between I and W; all pairs must fit.
    dense_bytes, expert_bytes: what a parameter takes for ever. limits [P]: bytes for both.
    """

    home: Indices
    live: tuple[tuple[tuple[float, float], ...], ...]
    dense_bytes: float
    expert_bytes: float
    limits: tuple[float, ...]


def joined(items: Floats) -> Floats:
    """Items [L + 2] as parts are cut from them, [L + 1]: the embedding with the first layer."""
    return np.concatenate([[items[0] + items[1]], items[2:]])


def balanced(costs: Floats, *, stages: int) -> tuple[int, ...]:
    """Layers of each stage [S] by cost. costs: seconds of each item [L + 2]."""
    return _layers(partition(joined(costs).tolist(), stages))


def within_room(costs: Floats, table: Floats, room: Room) -> tuple[int, ...] | None:
    """The same among splits whose every stage fits; None where there is none.

    table: items [len(Row), L + 2].
    """
    reach = _reach(table, room)
    parts = partition_within(joined(costs).tolist(), [reach[rank] for rank in room.home])
    return None if parts is None else _layers(parts)


def even(*, layers: int, stages: int) -> tuple[int, ...] | None:
    """The same number of layers everywhere, as Megatron-LM does if not told otherwise."""
    return None if layers % stages else (layers // stages,) * stages


def _layers(parts: Sequence[int]) -> tuple[int, ...]:
    """From items of each part to layers: the head is none."""
    return (*parts[:-1], parts[-1] - 1)


def _reach(table: Floats, room: Room) -> list[list[int]]:
    """For a stage of each rank [P] that begins at an item, up to which item it can go."""
    states = table[Row.DENSE] * room.dense_bytes + table[Row.EXPERT] * room.expert_bytes
    stay, kept, held = (
        np.concatenate([[0.0], np.cumsum(joined(of_item))])
        for of_item in (states, table[Row.KEPT], table[Row.HELD])
    )
    reach = []
    for count, pairs, limit in zip(np.bincount(room.home), room.live, room.limits, strict=True):
        sums = [count * stay + a * kept + b * held for a, b in pairs]
        ends = [np.searchsorted(total, total[:-1] + limit, side="right") - 1 for total in sums]
        furthest = np.minimum.reduce(ends)
        reach.append(np.maximum(furthest, np.arange(len(furthest))).tolist())
    return reach
