"""The search beyond the memory limit, where activations may leave or be made again.

It looks for schedules with twice the memory and with all that they want, and asks of each whether
it can be brought within the limit (see `relief`). No bound that counts on the limit holds then, so
the bound is the one without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from fullbore.cost.recut import recut
from fullbore.search.arm import Arm
from fullbore.search.budget import Budget
from fullbore.search.candidates import Job, candidates
from fullbore.search.race import Race
from fullbore.search.relief import Relieved, keeping_all, relieve
from fullbore.search.tokens import Tokens, schedule_of

__all__ = ["Beyond", "search_beyond"]

_ROOMIER = (2.0, None)  # times the limit
_RACING = 0.6  # share of the time for each of them; the rest is for bringing schedules within it


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
        limit = None if times is None else job.memory_limit.times(times)
        arms = [
            Arm(one, spans=job.spans) for one in candidates(replace(roomier, memory_limit=limit))
        ]
        share = (1 - since) / len(_ROOMIER)
        begin = since + share * number
        raced = begin + share * _RACING
        race = Race(arms, budget, random, begin=begin, until=raced, told_s=below_s)
        race.begin()
        race.run()
        bound_s = min(bound_s, race.bound_s)
        for together, one in product((True, False), _offered(race)):
            if budget.is_spent(begin + share):
                break
            if one.value_s >= below_s:
                continue  # what is added to a schedule makes it no shorter
            found = _within(job, one, together=together, below_s=below_s)
            if found is not None:
                best, placement, below_s = found, one.arm.candidate.label, found.value_s
    return Beyond(best=best, placement=placement, bound_s=bound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    arm: Arm
    tokens: Tokens
    value_s: float


def _offered(race: Race) -> list[_Offer]:
    """The best of each arm, what the heats ended with, and every named schedule; best first."""
    offered = [
        _Offer(arm=arm, tokens=arm.best, value_s=arm.best_s)
        for arm in race.arms
        if arm.best is not None
    ]
    for arm, start in race.finalists:
        offered.append(_Offer(arm=arm, tokens=start.tokens, value_s=start.value_s))
    for arm in race.arms:
        for one in arm.candidate.named:
            offered.append(_Offer(arm=arm, tokens=one.tokens, value_s=one.value_s))
    return sorted(offered, key=lambda offer: offer.value_s)


def _within(job: Job, offer: _Offer, *, together: bool, below_s: float) -> Relieved | None:
    assert job.memory_limit is not None
    arm = offer.arm
    schedule = schedule_of(
        offer.tokens, arm.candidate.placement, microbatches=job.microbatches, name="found"
    )
    return relieve(
        schedule,
        recut(job.costs, stages=arm.instance.stages),
        limit=job.memory_limit,
        means=job.means,
        together=together,
        spans=job.spans,
        below_s=below_s,
    )
