"""Costs read off measured timelines, in the simulator's terms, so that it can predict them again.

The simulator starts a compute action at

    start = max(end of the rank's action before, usable, end of its RELOAD) + overhead_s
    usable = end of the compute that made the message + hop_s

and each cost is read off as the quantity in these lines: `hop_s` where a receiver was waiting when
its message was made, `overhead_s` as start - max(...). Waiting is thus never taken for host time,
nor host time that passed while a message was on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.cost.costs import Costs
from fullbore.errors import CostsError
from fullbore.ir import Kind, Schedule
from fullbore.timeline import Timeline

__all__ = ["costs_of"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_TIMES = {
    Kind.F: "forward_s",
    Kind.B: "backward_s",
    Kind.I: "input_grad_s",
    Kind.W: "weight_grad_s",
    Kind.R: "recompute_s",
    Kind.OFFLOAD: "offload_s",
    Kind.RELOAD: "reload_s",
}


def costs_of(
    timelines: Sequence[Timeline],
    schedule: Schedule,
    *,
    activation_bytes: Sequence[float] | None = None,
    input_grad_held_bytes: Sequence[float] | None = None,
    recompute_input_bytes: Sequence[float] | None = None,
    offload_bytes: Sequence[float] | None = None,
    message_bytes: float = 0.0,
    overlap: bool = True,
) -> Costs:
    """What the actions of a schedule cost in these steps of it, each with sends and receives.

    Times of a stage are medians over microbatches and steps. hop_s is the median over messages
    whose receiver was waiting (0 where none was); it holds the transfer, so no bandwidth is given.
    overhead_s is the mean over compute actions of a step, and of steps the median: a step is the
    sum of its actions, while one disturbed step should not count.
    activation_bytes: [S], what one microbatch's forward of a stage keeps. input_grad_held_bytes:
    [S], what is held for it between I and W. recompute_input_bytes: [S], what is held for it until
    it is recomputed. offload_bytes: [S], what of it leaves for the host. message_bytes: of one
    message, for the record. overlap: False where each send held its rank up.

    Raises CostsError where there is no step, or a stage that a step never ran.
    """
    if not timelines:
        raise CostsError("no step was measured: costs need at least one timeline")
    steps = [_Step(timeline, schedule) for timeline in timelines]
    hops = np.concatenate([step.hops_s() for step in steps])
    hop_s = float(np.median(hops)) if len(hops) else 0.0
    leads = [step.leads_s(hop_s, overlap=overlap) for step in steps]
    overhead_s = float(np.median([lead.mean() if len(lead) else 0.0 for lead in leads]))
    stages = [_stage_times(timelines, stage, schedule.slices) for stage in range(schedule.stages)]
    for name, sizes in (
        ("activation_bytes", activation_bytes),
        ("input_grad_held_bytes", input_grad_held_bytes),
        ("recompute_input_bytes", recompute_input_bytes),
        ("offload_bytes", offload_bytes),
    ):
        for stage, size in zip(stages, sizes or (), strict=sizes is not None):
            stage[name] = float(size)
    return Costs.parse(
        {
            "stages": stages,
            "hop_s": max(0.0, hop_s),
            "message_bytes": float(message_bytes),
            "overhead_s": overhead_s,
        },
        where="measured costs",
    )


def _stage_times(timelines: Sequence[Timeline], stage: int, slices: int) -> dict[str, float]:
    """Of whole microbatches: later slices of a sequence take longer, so each counts for itself."""
    times: dict[str, float] = {}
    for kind, name in _TIMES.items():
        chosen = [(t.kind == kind) & (t.stage == stage) for t in timelines]
        durations = np.concatenate(
            [(t.end_s - t.start_s)[at] for t, at in zip(timelines, chosen, strict=True)]
        )
        number = np.concatenate(
            [t.microbatch[at] % slices for t, at in zip(timelines, chosen, strict=True)]
        )
        if len(durations):
            times[name] = sum(float(np.median(durations[number == k])) for k in range(slices))
    if "forward_s" not in times or not ({"backward_s", "input_grad_s"} & times.keys()):
        raise CostsError(f"no step ran stage {stage} forward and backward: its cost is not known")
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """The receives of a step, arrays of one length [n]."""

    at: Indices  # the RECV span
    made_s: Floats  # when the compute that makes the message ended


class _Step:
    """One measured step, read in the simulator's terms."""

    def __init__(self, timeline: Timeline, schedule: Schedule) -> None:
        self._timeline = timeline
        self._messages = _messages(timeline, schedule)
        self._back_s = _back(timeline, schedule)
        started_s = timeline.start_s[self._messages.at]
        self._waiting = started_s <= self._messages.made_s

    def hops_s(self) -> Floats:
        """From the end of the compute to the receiver having the message, where it waited."""
        arrived_s = self._timeline.end_s[self._messages.at]
        return (arrived_s - self._messages.made_s)[self._waiting]

    def leads_s(self, hop_s: float, *, overlap: bool) -> Floats:
        """Host time before each compute action that has anything before it."""
        timeline = self._timeline
        ready_s = np.full(len(timeline), -np.inf)
        arrived_s = timeline.end_s[self._messages.at]
        expected_s = np.minimum(arrived_s, self._messages.made_s + hop_s)
        ready_s[self._messages.at] = np.where(self._waiting, arrived_s, expected_s)
        compute = timeline.is_compute
        ready_s[compute] = timeline.end_s[compute]
        if not overlap:
            sends = (timeline.kind == Kind.SEND_F) | (timeline.kind == Kind.SEND_B)
            ready_s[sends] = timeline.end_s[sends]
        leads = [
            _leads_of_rank(timeline.start_s[at], ready_s[at], self._back_s[at], compute[at])
            for at in (np.flatnonzero(timeline.rank == rank) for rank in range(timeline.ranks))
        ]
        return np.concatenate([np.zeros(0), *leads])


def _leads_of_rank(
    start_s: Floats, ready_s: Floats, back_s: Floats, compute: npt.NDArray[np.bool_]
) -> Floats:
    """start - max(its RELOAD, everything since and with the compute before) of one rank's compute
    actions.
    """
    at = np.flatnonzero(compute)
    if not len(at):
        return np.zeros(0)
    first = float(ready_s[: at[0]].max(initial=-np.inf))
    between = np.maximum.reduceat(ready_s, at)[:-1]
    leads = start_s[at] - np.maximum(np.concatenate([[first], between]), back_s[at])
    known: Floats = np.maximum(leads[np.isfinite(leads)], 0.0)
    return known


def _back(timeline: Timeline, schedule: Schedule) -> Floats:
    """For each span [n] of a B or I, when what it needs had come back from the host; else -inf."""
    ended_s = np.full((schedule.stages, schedule.microbatches), -np.inf)
    reload = timeline.kind == Kind.RELOAD
    ended_s[timeline.stage[reload], timeline.microbatch[reload]] = timeline.end_s[reload]
    backward = (timeline.kind == Kind.B) | (timeline.kind == Kind.I)
    return np.where(backward, ended_s[timeline.stage, timeline.microbatch], -np.inf)


def _messages(timeline: Timeline, schedule: Schedule) -> _Messages:
    """Every RECV with the end of the compute action, on another rank, that made its message."""
    ended_s = np.full((len(Kind), schedule.stages, schedule.microbatches), np.nan)
    compute = timeline.is_compute
    ended_s[timeline.kind[compute], timeline.stage[compute], timeline.microbatch[compute]] = (
        timeline.end_s[compute]
    )
    made_s = np.full(len(timeline), np.nan)
    for receive, step, makers in (
        (Kind.RECV_F, -1, (Kind.F,)),
        (Kind.RECV_B, +1, (Kind.B, Kind.I)),
    ):
        at = np.flatnonzero(timeline.kind == receive)
        stage, microbatch = timeline.stage[at] + step, timeline.microbatch[at]
        made_s[at] = np.fmax.reduce([ended_s[kind, stage, microbatch] for kind in makers])
    found = np.flatnonzero(~np.isnan(made_s))
    return _Messages(at=found, made_s=made_s[found])
