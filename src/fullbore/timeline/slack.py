"""Slack: by how much later each action may end without moving the end of the step.

Everything else takes as long as before. Walk back from the end: an action may slip by what those
that wait for it may slip, and by the time for which they wait for others anyway. Waiting for an
action are the next one on its rank, whoever takes its message, and the messages and copies that
queue behind its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Schedule, dependencies
from fullbore.timeline.critical import as_run
from fullbore.timeline.timeline import Timeline

__all__ = ["Transit", "slack"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transit:
    """What passes between spans: seconds for which a message keeps its link, then until it is
    there, and of host time before a compute action; and whether senders wait for the arrival.
    """

    occupancy_s: float = 0.0
    hop_s: float = 0.0
    overhead_s: float = 0.0
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Pairs of spans [e], and how much the first may slip until the second one moves."""

    before: Indices
    after: Indices
    gap_s: Floats


def slack(timeline: Timeline, schedule: Schedule, transit: Transit | None = None) -> Floats:
    """Seconds [n] by which each span may end later while the makespan stays; 0 on critical ones.

    Exact for simulated timelines with their own transit. A RECV that did not wait, and a message
    that nobody takes, may slip for ever (inf).
    """
    edges = list(_edges(timeline, schedule, transit or Transit()))
    before, after = (np.concatenate([getattr(e, name) for e in edges]) for name in _ENDS)
    gap_s = np.concatenate([e.gap_s for e in edges])
    free_s = np.where(timeline.is_compute, timeline.makespan_s - timeline.end_s, np.inf)
    order = np.lexsort((timeline.start_s[before], timeline.end_s[before]))[::-1]
    listed = list(
        zip(before[order].tolist(), after[order].tolist(), gap_s[order].tolist(), strict=True)
    )
    free, changed = free_s.tolist(), True
    while changed:  # once and a look, but where spans of no length share an instant
        changed = False
        for earlier, later, gap in listed:
            if free[later] + gap < free[earlier]:
                free[earlier], changed = free[later] + gap, True
    return np.asarray(np.maximum(0.0, free))


_ENDS = ("before", "after")


def _edges(timeline: Timeline, schedule: Schedule, transit: Transit) -> Iterator[_Edges]:
    """Everything that waits for something."""
    deps = dependencies(as_run(timeline, schedule))
    kind, compute, copy = timeline.kind, timeline.is_compute, timeline.is_copy
    send = (kind == Kind.SEND_F) | (kind == Kind.SEND_B)
    receive = (kind == Kind.RECV_F) | (kind == Kind.RECV_B)
    end_s, begin_s = timeline.end_s, timeline.start_s.copy()
    begin_s[compute] -= transit.overhead_s
    crossing_s = transit.occupancy_s + (transit.hop_s if transit.blocking else 0.0)
    begin_s[send] = end_s[send] - crossing_s  # when a message enters its link

    def joined(before: Indices, after: Indices, delay_s: float = 0.0) -> _Edges:
        gap_s = np.maximum(0.0, begin_s[after] - end_s[before] - delay_s)
        return _Edges(before=before, after=after, gap_s=gap_s)

    holds = compute | (send & transit.blocking)
    yield joined(*_following(timeline.rank, first=holds, then=compute))
    yield joined(*_following(timeline.rank, first=holds, then=copy))
    yield joined(*_following(timeline.rank, first=copy, then=copy))
    made = np.flatnonzero(send & (deps.value != _NONE))
    yield joined(deps.value[made], made)
    taken = np.flatnonzero(compute & (deps.value != _NONE))
    taken = taken[receive[deps.value[taken]]]
    sent = deps.value[deps.value[taken]]
    there = sent != _NONE
    delay_s = 0.0 if transit.blocking else transit.hop_s
    yield joined(sent[there], taken[there], delay_s)
    yield joined(deps.value[taken], taken)
    yield joined(*_queued(timeline, taken[there], sent[there]))
    loaded = np.flatnonzero(compute & (deps.stored != _NONE))
    loaded = loaded[kind[deps.stored[loaded]] == Kind.RELOAD]
    yield joined(deps.stored[loaded], loaded)


def _following(
    rank: npt.NDArray[np.int32], *, first: npt.NDArray[np.bool_], then: npt.NDArray[np.bool_]
) -> tuple[Indices, Indices]:
    """For each span of `then` the last one of `first` before it on its rank, where there is one."""
    here = np.where(first, np.arange(len(rank)), _NONE)
    before = np.concatenate([[_NONE], np.maximum.accumulate(here)[:-1]])
    after = np.flatnonzero(then & (before != _NONE))
    after = after[rank[before[after]] == rank[after]]
    return before[after], after


def _queued(timeline: Timeline, taken: Indices, sent: Indices) -> tuple[Indices, Indices]:
    """Messages that follow each other on a link, which joins two ranks."""
    link = timeline.rank[sent] * np.int64(timeline.ranks) + timeline.rank[taken]
    order = np.lexsort((sent, link))
    follows = link[order][1:] == link[order][:-1]
    return sent[order][:-1][follows], sent[order][1:][follows]
