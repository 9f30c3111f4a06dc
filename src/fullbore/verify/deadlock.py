"""The law that every rank reaches its end.

Sends never hold up their sender, so a rank waits for two things only: in a compute-only schedule
for what another rank computes, in one with communication for the messages that it receives.
Receives are posted ahead in a bounded window; a message beyond the window waits at its sender,
whose later messages queue behind it, and nobody waits for those before it waits for this one,
since links are first in, first out. So the bound changes nothing, whatever it is.

It does where a sender waits: with `blocking_sends` message k is sent only once its receive is
posted, which is when message k - window has been taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from fullbore.ir import FlatSchedule, Kind, dependencies
from fullbore.passes import insert_communication
from fullbore.verify.case import Case, Indices
from fullbore.verify.links import links, messages_of, window
from fullbore.verify.violation import Finding
from fullbore.verify.walk import walk

__all__ = ["finishes"]

_MOST_RANKS_OF_A_CYCLE = 12


def finishes(case: Case) -> Iterator[Finding]:
    """Every rank reaches the end of its program (judged where all other laws but memory hold)."""
    crossing = case.needs.value >= 0
    crossing &= case.flat.rank[case.needs.value] != case.flat.rank
    needs = np.where(crossing, case.needs.value, -1)
    stuck = list(_stuck(case.flat, needs))
    yield from stuck
    if case.blocking_sends and not stuck:
        yield from _blocked(case)


def _stuck(flat: FlatSchedule, needs: Indices) -> Iterator[Finding]:
    """A finding for each rank that waits for ever."""
    reached = walk(flat, needs).reached
    for rank in np.flatnonzero(reached < flat.offsets[1:]).tolist():
        at, needed = int(reached[rank]), int(needs[reached[rank]])
        other = int(flat.rank[needed])
        there = int(reached[other])
        yield Finding(
            rank=rank,
            index=int(at - flat.offsets[rank]),
            action=flat.action(at),
            detail=f"waits for ever for {flat.action(needed)} of rank {other}, which stands at "
            f"index {there - flat.offsets[other]}, {flat.action(there)}, and waits itself"
            f"{_cycle(flat, needs, reached, rank)}",
            remedy=f"on rank {other}, move {flat.action(needed)} before {flat.action(there)}, or "
            "move this action back",
        )


def _cycle(flat: FlatSchedule, needs: Indices, reached: Indices, rank: int) -> str:
    """The circle of ranks that wait for one another, which every stuck rank leads into."""
    path: dict[int, int] = {}
    while rank not in path:
        path[rank] = len(path)
        rank = int(flat.rank[needs[reached[rank]]])
    circle = [*list(path)[path[rank] :], rank]
    if len(circle) > _MOST_RANKS_OF_A_CYCLE:
        return f" (a circle of {len(circle) - 1} ranks)"
    return f" (in a circle: rank {' -> '.join(map(str, circle))})"


def _blocked(case: Case) -> Iterator[Finding]:
    """Deadlocks that only blocking sends cause; in the program with communication."""
    channelled = insert_communication(case.schedule)
    flat, value = channelled.flat(), dependencies(channelled).value
    messages = messages_of(flat, value)
    needs = np.full(len(value), -1, dtype=np.int64)
    needs[messages.receive] = messages.send
    for link, (start, stop) in zip(
        links(channelled), pairwise(messages.starts.tolist()), strict=True
    ):
        ahead = window(link, ranks=channelled.ranks)
        needs[messages.send[start + ahead : stop]] = messages.receive[start : stop - ahead]
    for finding in _stuck(flat, needs):
        told = replace(finding, remedy=f"let sends overlap with computation, or {finding.remedy}")
        yield told if case.communicates else _beside_its_compute(flat, told)


def _beside_its_compute(flat: FlatSchedule, finding: Finding) -> Finding:
    """The index that a SEND or RECV's own compute action has where communication is implied."""
    assert finding.index is not None
    start = int(flat.offsets[finding.rank])
    before = int((flat.kind[start : start + finding.index] < Kind.SEND_F).sum())
    sends = finding.action.kind in (Kind.SEND_F, Kind.SEND_B)
    return replace(finding, index=before - 1 if sends else before)
