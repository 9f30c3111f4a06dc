"""The search beyond the memory limit, where activations may leave or be made again.

It looks for schedules with twice the memory and with all that they want, and asks of each whether
it can be brought within the limit (see `relief`). No bound that counts on the limit holds then, so
the bound is the one without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fullbore.cost.recut import recut
from fullbore.search.arm import Arm
from fullbore.search.budget import Budget
from fullbore.search.candidates import Job, candidates
from fullbore.search.memory import MemoryLimit
from fullbore.search.race import Race
from fullbore.search.relief import Relieved, keeping_all, relieve
from fullbore.search.tokens import Tokens, schedule_of

__all__ = ["Beyond", "search_beyond"]

_ROOMIER = (2.0, None)  # times the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What was found, or None, on which placement; and what nothing can be below."""

    best: Relieved | None
    placement: str
    bound_s: float


def search_beyond(
    job: Job, budget: Budget, random: np.random.Generator, *, since: float, below_s: float
) -> Beyond:
    """Spend the budget, from the share `since` on, on what is below below_s by the job's means."""
    assert job.memory_limit is not None
    roomier = replace(job, costs=keeping_all(job.costs))
    best, placement, bound_s = None, "", below_s
    for number, times in enumerate(_ROOMIER):
        limit = None if times is None else _times(job.memory_limit, times)
        arms = [
            Arm(one, spans=job.spans) for one in candidates(replace(roomier, memory_limit=limit))
        ]
        begin, until = (since + (1 - since) * (number + k) / len(_ROOMIER) for k in (0, 1))
        race = Race(arms, budget, random, begin=begin, until=until)
        race.begin()
        race.run()
        bound_s = min(bound_s, race.bound_s)
        for arm, tokens in _offered(race):
            found = _within(job, arm, tokens, below_s=below_s)
            if found is not None:
                best, placement, below_s = found, arm.candidate.label, found.value_s
    return Beyond(best=best, placement=placement, bound_s=bound_s)


def _times(limit: MemoryLimit, times: float) -> MemoryLimit:
    return replace(limit, amount=limit.amount * times)


def _offered(race: Race) -> list[tuple[Arm, Tokens]]:
    """The best of each arm, what the heats ended with, and every named schedule."""
    offered = [(arm, arm.best) for arm in race.arms if arm.best is not None]
    offered += [(arm, start.tokens) for arm, start in race.finalists]
    return offered + [(arm, one.tokens) for arm in race.arms for one in arm.candidate.named]


def _within(job: Job, arm: Arm, tokens: Tokens, *, below_s: float) -> Relieved | None:
    assert job.memory_limit is not None
    schedule = schedule_of(
        tokens, arm.candidate.placement, microbatches=job.microbatches, name="found"
    )
    return relieve(
        schedule,
        recut(job.costs, stages=arm.instance.stages),
        limit=job.memory_limit,
        means=job.means,
        spans=job.spans,
        below_s=below_s,
    )
