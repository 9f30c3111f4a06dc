"""The critical path: the chain of actions that decided how long the step took.

Walk back from the last compute action, each time to whatever the action had to wait for longest:
the rank's previous action, the message that it took, or the copy from the host. What shortens
nothing on this path shortens nothing at all. A timeline's spans in order are programs with sends
and receives, so the dependencies are those of `fullbore.ir`, and simulated and measured timelines
are treated alike.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.ir import Dependencies, Kind, Program, Schedule, dependencies
from fullbore.timeline.timeline import Timeline

__all__ = ["as_run", "critical_path"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NONE = -1
_SAME_TIME = 1e-12  # of the makespan: what rounding can put between two equal times


def critical_path(timeline: Timeline, schedule: Schedule) -> list[int]:
    """Indices of the spans on the critical path, in order of time; empty where nothing computes.

    Each span is preceded by what determined its start. A message appears as its SEND and the RECV
    that waited for it; a RECV whose message was already there is left out. Between two spans time
    passes only in host overhead or while a message is on its way.
    """
    compute = np.flatnonzero(timeline.is_compute)
    if not len(compute):
        return []
    cause = _causes(timeline, schedule)
    skipped = _is_receive(timeline) & (cause == _previous(timeline))
    at, path = int(compute[np.argmax(timeline.end_s[compute])]), []
    while at != _NONE:
        if not skipped[at]:
            path.append(at)
        at = int(cause[at])
    return path[::-1]


def _causes(timeline: Timeline, schedule: Schedule) -> Indices:
    """For each span [n] the span that determined its start (a RECV's: its end), or -1."""
    deps = dependencies(as_run(timeline, schedule))
    cause = _previous(timeline)
    receive, send = _is_receive(timeline), _is_send(timeline)

    waited = receive & _waited(timeline, deps)
    cause[waited] = deps.value[waited]

    cause[send] = deps.value[send]
    before = _previous_on_link(timeline, deps)
    queued = send & (before != _NONE)
    queued[queued] = _after(timeline, timeline.end_s[before[queued]], timeline.start_s[queued])
    cause[queued] = before[queued]

    copy = timeline.is_copy
    before = _last(timeline.rank, copy)
    queued = copy & (before != _NONE)
    queued[queued] = timeline.end_s[before[queued]] > _ends(timeline, cause[queued])
    cause[queued] = before[queued]

    direct = timeline.is_compute & (deps.value != _NONE)
    direct[direct] = timeline.rank[deps.value[direct]] != timeline.rank[direct]
    direct[direct] = timeline.end_s[deps.value[direct]] > _ends(timeline, cause[direct])
    cause[direct] = deps.value[direct]

    reloaded = timeline.is_compute & (deps.stored != _NONE)
    reloaded[reloaded] = timeline.kind[deps.stored[reloaded]] == Kind.RELOAD
    reloaded[reloaded] = _after(
        timeline, timeline.end_s[deps.stored[reloaded]], _ends(timeline, cause[reloaded])
    )
    cause[reloaded] = deps.stored[reloaded]
    return cause


def _ends(timeline: Timeline, spans: Indices) -> Floats:
    """When these spans ended, -inf for none."""
    return np.where(spans == _NONE, -np.inf, timeline.end_s[spans])


def as_run(timeline: Timeline, schedule: Schedule) -> Schedule:
    """The timeline's spans as programs, so that flat indices are indices of spans."""
    bounds = np.searchsorted(timeline.rank, np.arange(timeline.ranks + 1))
    spans = Program(kind=timeline.kind, stage=timeline.stage, microbatch=timeline.microbatch)
    return Schedule(
        name=timeline.name,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        programs=tuple(spans.select(np.arange(*between)) for between in pairwise(bounds)),
    )


def _is_send(timeline: Timeline) -> Mask:
    return np.isin(timeline.kind, (Kind.SEND_F, Kind.SEND_B))


def _is_receive(timeline: Timeline) -> Mask:
    return np.isin(timeline.kind, (Kind.RECV_F, Kind.RECV_B))


def _after(timeline: Timeline, later_s: Floats, sooner_s: Floats) -> Mask:
    return later_s > sooner_s + _SAME_TIME * timeline.makespan_s


def _previous(timeline: Timeline) -> Indices:
    """For each span [n] the last one before it that kept its rank from going on, or -1.

    Copies never do. Sends do so only where every single one was over before its rank went on.
    """
    send, copy = _is_send(timeline), timeline.is_copy
    goes_on = ~send & ~copy
    following = _last(timeline.rank[::-1], goes_on[::-1])[::-1]
    following = np.where(following == _NONE, _NONE, len(send) - 1 - following)
    watched = send & (following != _NONE) & (timeline.end_s > timeline.start_s)
    overlapped = _after(timeline, timeline.end_s[watched], timeline.start_s[following[watched]])
    blocking = bool(watched.any()) and not overlapped.any()
    return _last(timeline.rank, goes_on | (send & blocking))


def _last(group: npt.NDArray[np.integer], chosen: Mask) -> Indices:
    """For each position [n] the last chosen one before it in the same group, or -1."""
    here = np.where(chosen, np.arange(len(chosen)), _NONE)
    before = np.concatenate([[_NONE], np.maximum.accumulate(here)[:-1]])
    other = (before != _NONE) & (group[before] != group)
    return np.where(other, _NONE, before)


def _waited(timeline: Timeline, deps: Dependencies) -> Mask:
    """Which RECV spans [n] had to wait: the message was not there when the rank came for it.

    It was there once the sender had sent it and the quickest transit seen on its link had passed.
    """
    waited = np.zeros(len(timeline), dtype=np.bool_)
    taken = np.flatnonzero(_is_receive(timeline) & (deps.value != _NONE))
    sent_s = timeline.end_s[deps.value[taken]]
    link = timeline.rank[deps.value[taken]] * np.int64(timeline.ranks) + timeline.rank[taken]
    quickest = np.full(timeline.ranks**2, np.inf)
    np.minimum.at(quickest, link, np.maximum(timeline.end_s[taken] - sent_s, 0.0))
    waited[taken] = _after(timeline, sent_s + quickest[link], timeline.start_s[taken])
    return waited


def _previous_on_link(timeline: Timeline, deps: Dependencies) -> Indices:
    """For each SEND span [n] the SEND before it to the same rank, or -1."""
    taken = np.flatnonzero(_is_receive(timeline) & (deps.value != _NONE))
    link = np.full(len(timeline), _NONE, dtype=np.int64)
    link[deps.value[taken]] = (
        timeline.rank[deps.value[taken]] * np.int64(timeline.ranks) + timeline.rank[taken]
    )
    sends = np.flatnonzero(link != _NONE)
    sends = sends[np.argsort(link[sends], kind="stable")]
    before = np.full(len(timeline), _NONE, dtype=np.int64)
    follows = link[sends[1:]] == link[sends[:-1]]
    before[sends[1:][follows]] = sends[:-1][follows]
    return before
