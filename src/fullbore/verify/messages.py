"""The laws about communication, for schedules in which it is written out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind
from fullbore.verify.case import Case
from fullbore.verify.links import messages_of
from fullbore.verify.violation import Finding

__all__ = ["first_in_first_out", "sent_and_received"]


def sent_and_received(case: Case) -> Iterator[Finding]:
    """Each message between two ranks has exactly one SEND and one RECV, and there are no others."""
    if not case.communicates:
        return
    for kind, expected in _expected(case).items():
        for index in case.repeated(kind).tolist():
            yield case.at(index, detail="occurs a second time", remedy="delete one of the two")
        counts = case.counts(kind)
        everywhere = expected[np.arange(case.schedule.microbatches) % len(expected)].T
        for stage, microbatch in np.argwhere((counts == 0) & everywhere).tolist():
            yield case.missing(kind, stage, microbatch, why=_why(case, kind, stage, microbatch))
        copy = case.flat.microbatch % len(expected)
        stray = (case.flat.kind == kind) & ~expected[copy, case.flat.stage]
        for index in np.flatnonzero(stray).tolist():
            yield case.at(
                index,
                detail="there is no such message: the neighbouring stage is on the same rank, "
                "or there is none",
                remedy="delete it",
            )


def _expected(case: Case) -> dict[Kind, npt.NDArray[np.bool_]]:
    """For each kind of communication, which stages of which copy [C, S] do it."""
    crosses = np.pad(case.homes[:, 1:] != case.homes[:, :-1], ((0, 0), (1, 1)))
    from_before, to_after = crosses[:, :-1], crosses[:, 1:]
    return {
        Kind.SEND_F: to_after,
        Kind.RECV_F: from_before,
        Kind.SEND_B: from_before,
        Kind.RECV_B: to_after,
    }


def _why(case: Case, kind: Kind, stage: int, microbatch: int) -> str:
    neighbour = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
    home = case.homes[microbatch % len(case.homes), neighbour]
    return f"stage {neighbour} is on rank {home}"


def first_in_first_out(case: Case) -> Iterator[Finding]:
    """Messages from one rank to another are taken in the order in which they are sent."""
    if not case.communicates:
        return
    messages = messages_of(case.flat, case.needs.value)
    overtakes = np.diff(messages.receive, prepend=-1) < 0
    overtakes[messages.starts[:-1]] = False
    for later in np.flatnonzero(overtakes).tolist():
        first = int(messages.receive[later - 1])
        yield case.at(
            int(messages.receive[later]),
            detail=f"is taken before {case.flat.action(first)} (index {case.index(first)}), "
            f"which rank {case.flat.rank[messages.send[later]]} sends earlier",
            remedy=f"take {case.flat.action(first)} first, or swap the two sends",
        )
