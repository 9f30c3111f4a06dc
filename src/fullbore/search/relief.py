"""Memory beyond the limit, for schedules that need it: activations that leave, or are made again.

A schedule found for more memory than there is can still be had: where a rank holds too much, its
activations go to the host after their forward (OFFLOAD) or are dropped and computed again (R). Of
all ways that bring a rank within the limit the one is taken after which the whole ends soonest,
for all such ranks together, or for one after the other. Times and memory are the simulator's,
copies included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fullbore.cost import Costs
from fullbore.errors import CostsError
from fullbore.ir import COMPUTE_KINDS, Schedule
from fullbore.passes import offload, recompute_ahead
from fullbore.search.memory import ROUNDING, MemoryLimit
from fullbore.sim import memory_curves, simulate
from fullbore.timeline import Timeline, live_curves

__all__ = ["MEANS", "Means", "Relieved", "check_means", "keeping_all", "relieve"]

Means = Literal["offload", "recompute"]
MEANS: tuple[Means, ...] = ("offload", "recompute")

_AHEAD = (0, 1)  # compute actions between a RELOAD, or an R, and its backward

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relieved:
    """A schedule, the costs of its stages, and its objective. peaks: [P] in the limit's unit."""

    schedule: Schedule
    costs: Costs
    value_s: float
    peaks: Floats


def check_means(means: Sequence[Means], costs: Costs) -> None:
    """Raise CostsError where the costs do not say what an OFFLOAD, or an R, would take."""
    stages = range(len(costs.stages))
    if "offload" in means and any(costs.offload_s(stage) is None for stage in stages):
        raise CostsError(
            "nothing says how long it takes to send activations to the host: give offload_s of "
            "every stage, or activation_bytes and the file's offload_bytes_per_s"
        )
    if "recompute" in means and any(one.recompute_input_bytes is None for one in costs.stages):
        raise CostsError(
            "nothing says what a stage holds until it computes its activations again: give "
            "activation_bytes and recompute_input_bytes of every stage"
        )


def keeping_all(costs: Costs) -> Costs:
    """The same costs for stages that recompute nothing."""
    return _with_inputs(costs, frozenset())


def relieve(
    schedule: Schedule,
    costs: Costs,
    *,
    limit: MemoryLimit,
    means: Sequence[Means],
    together: bool,
    spans: bool,
    below_s: float,
) -> Relieved | None:
    """The schedule within the limit, if it can be had with an objective under below_s.

    costs: those of the schedule's stages, as they are where one recomputes. together: the same way
    for every rank that holds too much, which is quick; else each has its own.
    """
    most = limit.resolve(
        keeping_all(costs), ranks=schedule.ranks, microbatches=schedule.microbatches
    ) * (1 + ROUNDING)
    in_bytes = limit.counts_bytes(costs)
    look = _Look(full_costs=costs, in_bytes=in_bytes, spans=spans)
    now = look.judge(schedule, frozenset())
    over = np.flatnonzero(now.peaks > most)
    for ranks in [over] if together else over.reshape(-1, 1):
        ways = [way for way in look.ways(now, ranks, means) if (way.peaks <= most)[ranks].all()]
        now = min(ways, key=lambda way: way.value_s, default=now)
        if not ways or now.value_s >= below_s:
            return None
    return now if (now.peaks <= most).all() and now.value_s < below_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """How schedules are judged."""

    full_costs: Costs
    in_bytes: bool
    spans: bool

    def judge(self, schedule: Schedule, again: frozenset[int]) -> Relieved:
        """Simulate a schedule in which these stages are computed again."""
        costs = _with_inputs(self.full_costs, again)
        timeline = simulate(schedule, costs)
        curves = memory_curves(timeline, schedule, costs) if self.in_bytes else None
        curves = live_curves(timeline, schedule) if curves is None else curves
        return Relieved(
            schedule=schedule,
            costs=costs,
            value_s=_longest_span_s(timeline) if self.spans else timeline.makespan_s,
            peaks=np.array([curve.peak for curve in curves]),
        )

    def ways(
        self, now: Relieved, ranks: npt.NDArray[np.int64], means: Sequence[Means]
    ) -> Iterator[Relieved]:
        """Every way to lighten these ranks."""
        home = np.array(now.schedule.placement.stage_to_rank)
        stages = np.flatnonzero(np.isin(home, ranks)).tolist()
        again = _recomputing(now.costs)
        if "offload" in means:
            for away in (1, now.schedule.ranks):
                for ahead in _AHEAD:
                    yield self.judge(
                        offload(now.schedule, stages=stages, away=away, ahead=ahead), again
                    )
        if "recompute" in means:
            for ahead in _AHEAD:
                yield self.judge(
                    recompute_ahead(now.schedule, stages=stages, ahead=ahead),
                    again | frozenset(stages),
                )


def _longest_span_s(timeline: Timeline) -> float:
    """The longest time from the first action of a rank to its last; copies are no actions here."""
    acts = np.isin(timeline.kind, COMPUTE_KINDS)
    rank, first, last = (
        timeline.rank[acts],
        np.full(timeline.ranks, np.inf),
        np.zeros(timeline.ranks),
    )
    np.minimum.at(first, rank, timeline.start_s[acts])
    np.maximum.at(last, rank, timeline.end_s[acts])
    return float((last - first).max())


def _recomputing(costs: Costs) -> frozenset[int]:
    given = enumerate(costs.stages)
    return frozenset(s for s, stage in given if stage.recompute_input_bytes is not None)


def _with_inputs(costs: Costs, again: frozenset[int]) -> Costs:
    """Costs in which no other stages recompute."""
    stages = [
        stage if s in again else stage.model_copy(update={"recompute_input_bytes": None})
        for s, stage in enumerate(costs.stages)
    ]
    return costs.model_copy(update={"stages": tuple(stages)})
