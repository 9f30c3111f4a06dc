"""The two loops of the verifier that no array operation expresses.

They are plain Python over indexable things: small schedules run them on lists as they stand,
large ones through numba, on arrays. They must stay within what numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["compiled", "follow_clocks", "walk_programs"]


@cache
def compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel as machine code, which numba keeps on disk between runs."""
    import numba

    machine_code: Callable[..., None] = numba.njit(cache=True)(kernel)
    return machine_code


def walk_programs(
    offsets: Any,  # [P + 1] where each rank's actions begin
    needs: Any,  # [N] the action of another rank that must be done first, or -1
    home: Any,  # [N] the rank on which `needs` stands, or -1
    needer: Any,  # [N] the rank of the action that needs this one, or -1
    reached: Any,  # out [P] where each rank stopped; begins as offsets[:-1]
    order: Any,  # out [N] the actions done, as they happened; filled with -1
    awaited: Any,  # scratch [P], filled with -1
    runnable: Any,  # scratch [P] the ranks, P - 1 first
) -> None:
    """Let each rank go on until it waits, and wake it when what it waits for is done."""
    done = 0
    waiting = len(runnable)
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        index = reached[rank]
        while index < offsets[rank + 1]:
            needed = needs[index]
            if needed >= 0 and reached[home[index]] <= needed:
                awaited[rank] = needed
                break
            order[done] = index
            done += 1
            other = needer[index]
            if other >= 0 and awaited[other] == index:
                awaited[other] = -1
                runnable[waiting] = other
                waiting += 1
            index += 1
        reached[rank] = index


def follow_clocks(
    at: Any,  # [n] flat index
    rank: Any,  # [n]
    message: Any,  # [n]
    is_send: Any,  # [n]
    target: Any,  # [messages] column of the destination, or -1
    column: Any,  # [P] column of a rank, or -1
    clock: Any,  # [P, columns] how far each rank knows each column's rank to be
    carried: Any,  # scratch [slots, columns] clocks of the messages under way
    slot: Any,  # scratch [messages]
    free: Any,  # scratch [slots] 0, 1, ...: the slots that are free, as a stack
    known: Any,  # out [messages]
) -> None:
    """Let every message carry its sender's clock to its receiver."""
    top = len(free)
    columns = len(clock[0])
    for step in range(len(at)):
        row = clock[rank[step]]
        number = message[step]
        if is_send[step]:
            if target[number] >= 0:
                known[number] = row[target[number]]
            if column[rank[step]] >= 0:
                row[column[rank[step]]] = at[step] + 1
            top -= 1
            slot[number] = free[top]
            content = carried[free[top]]
            for index in range(columns):
                content[index] = row[index]
        else:
            content = carried[slot[number]]
            free[top] = slot[number]
            top += 1
            for index in range(columns):
                row[index] = max(row[index], content[index])
