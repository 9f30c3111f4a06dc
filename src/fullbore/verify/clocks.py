"""Vector clocks: how far the receiver of a message must have come before it can be sent.

A message carries what its sender knows of every rank's progress (Fidge, Mattern, 1988). The
largest schedules have millions of messages and a thousand ranks, so the clocks go through numba
there, in blocks of columns that fit in memory; small ones run the same function as plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.verify.kernels import compiled, follow_clocks

__all__ = ["MessageOrder", "known_at_send"]

Indices = npt.NDArray[np.int64]

COMPILE_FROM_STEPS = 1_000_000
"""From here on numba pays for its import; a step is one column of one send or receive."""

BLOCK_VALUES = 2**24
"""How many values the clocks of messages under way may hold at once (64 MiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOrder:
    """Sends and receives [n] in one order in which they can happen.

    at: flat index. rank: where. message: which, 0-based. is_send: or a receive.
    destination: of each message [messages].
    """

    at: Indices
    rank: Indices
    message: Indices
    is_send: npt.NDArray[np.bool_]
    destination: Indices


def known_at_send(order: MessageOrder, offsets: Indices, about: Indices) -> Indices:
    """For each message: the flat index that its destination must have passed when it is sent.

    offsets: where each rank's actions begin, and the end [P + 1]. about: the destinations of
    interest; messages to others are left at 0.
    """
    under_way = np.cumsum(np.where(order.is_send, 1, -1))
    slots = int(under_way.max(initial=0))
    width = max(1, min(len(about), BLOCK_VALUES // max(1, slots)))
    known = np.zeros(len(order.destination), dtype=np.int64)
    for start in range(0, len(about), width):
        _follow(order, offsets, about[start : start + width], slots, known)
    return known


def _follow(
    order: MessageOrder, offsets: Indices, about: Indices, slots: int, known: Indices
) -> None:
    """One block of columns; fills `known` for messages whose destination is in `about`."""
    ranks = len(offsets) - 1
    column = np.full(ranks, -1, dtype=np.int64)
    column[about] = np.arange(len(about))
    arrays = {
        "at": order.at,
        "rank": order.rank,
        "message": order.message,
        "is_send": order.is_send,
        "target": column[order.destination],
        "column": column,
        "clock": np.tile(offsets[about].astype(np.int32), (ranks, 1)),
        "carried": np.zeros((slots, len(about)), dtype=np.int32),
        "slot": np.zeros(len(known), dtype=np.int64),
        "free": np.arange(slots),
        "known": known,
    }
    if len(order.at) * len(about) >= COMPILE_FROM_STEPS:
        compiled(follow_clocks)(**arrays)
    else:
        lists = {name: array.tolist() for name, array in arrays.items()}
        follow_clocks(**lists)
        known[:] = lists["known"]
