"""From the engine's times to a Timeline: a RECV before and a SEND after whatever implies one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import FlatSchedule, Kind, Schedule
from fullbore.timeline import Timeline

__all__ = ["Problem", "Times", "lay_out"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A schedule as the kernel wants it: arrays over its N actions (see `kernel`)."""

    flat: FlatSchedule
    provider: Indices
    reload: Indices
    reader: Indices
    link: Indices
    links: int
    occupancy_s: Floats
    duration_s: Floats
    lead_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The kernel's answer, arrays over the N actions (see `kernel`)."""

    reached_s: Floats
    start_s: Floats
    end_s: Floats
    left_s: Floats
    usable_s: Floats


def lay_out(schedule: Schedule, problem: Problem, times: Times, *, overlap: bool) -> Timeline:
    """The spans of all actions, written-out and implied messages alike, as each rank runs them."""
    flat, kind = problem.flat, problem.flat.kind
    compute, has_message = kind < Kind.OFFLOAD, problem.reader >= 0
    remote = (problem.provider >= 0) & (flat.rank != flat.rank[problem.provider])
    receives = np.flatnonzero(compute & remote)
    sends = np.flatnonzero(compute & has_message)
    before, after = (np.bincount(at, minlength=len(kind)) for at in (receives, sends))
    own = np.cumsum(1 + before + after) - 1 - after  # where each action's own span stands
    source = np.repeat(np.arange(len(kind)), 1 + before + after)

    sent_s = times.left_s if overlap else times.usable_s
    is_receive = (kind == Kind.RECV_F) | (kind == Kind.RECV_B)
    start_s = np.where(is_receive, times.reached_s, times.start_s)[source]
    end_s = np.where((kind >= Kind.SEND_F) & has_message, sent_s, times.end_s)[source]
    start_s[own[receives] - 1] = times.reached_s[receives]
    end_s[own[receives] - 1] = np.maximum(
        times.reached_s[receives], times.usable_s[problem.provider[receives]]
    )
    start_s[own[sends] + 1] = times.end_s[sends]
    end_s[own[sends] + 1] = sent_s[sends]
    span_kind = kind[source]
    forward = kind == Kind.F
    span_kind[own[receives] - 1] = np.where(forward[receives], Kind.RECV_F, Kind.RECV_B)
    span_kind[own[sends] + 1] = np.where(forward[sends], Kind.SEND_F, Kind.SEND_B)
    return Timeline(
        source="simulated",
        name=schedule.name,
        ranks=schedule.ranks,
        rank=flat.rank[source],
        kind=span_kind,
        stage=flat.stage[source],
        microbatch=flat.microbatch[source],
        start_s=start_s,
        end_s=end_s,
    )
