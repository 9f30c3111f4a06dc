"""Finds a schedule: from the best named ones and a list scheduler's, by local search.

Everything is drawn from one seed in one order, and time decides only when to stop. So a search
that is stopped by its number of moves gives the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fullbore.cost import Costs
from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.search.arm import CLOSE, Arm
from fullbore.search.beyond import Beyond, search_beyond
from fullbore.search.bound import reach_of
from fullbore.search.budget import Budget, Limits, Progress
from fullbore.search.candidates import (
    Job,
    Named,
    candidates,
    evaluated,
    fits_one,
    most_tokens,
)
from fullbore.search.exact import check_provable, prove
from fullbore.search.improve import seed_kernels
from fullbore.search.race import Race
from fullbore.search.relief import check_means, keeping_all
from fullbore.search.robust import Hardened, Jitter, compile_hardening, hardened
from fullbore.search.tokens import schedule_of

__all__ = ["Found", "search"]

_NOMINAL = 0.5  # share of the budget that is spent without jitter, or within the limit, first


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule and how good it is.

    costs: those of the schedule's own stages. value_s, bound_s: its objective, and what no
    schedule on any placement that was considered can be below. named: the best named schedule
    that fits, or None. placements: those considered, in words. moves, elapsed_s: what was spent.
    quantile_s: what a robust search was for, and `named` is judged by; value_s has no jitter then.
    """

    schedule: Schedule
    costs: Costs
    value_s: float
    bound_s: float
    named: Named | None
    placements: tuple[str, ...]
    placement: str
    moves: int
    elapsed_s: float
    quantile_s: float | None = None

    @property
    def gap(self) -> float:
        """How far above the best possible the objective is at most, as a share of it."""
        return max(0.0, 1 - self.bound_s / self.value_s) if self.value_s > 0 else 0.0


def search(
    job: Job,
    *,
    limits: Limits | None = None,
    jitter: Jitter | None = None,
    prove_s: float | None = None,
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Found:
    """The best schedule found within the limits; never worse than a named one that fits.

    jitter: for a schedule that is good on most steps, rather than on one where nothing varies; what
    is searched for is the quantile then. prove_s: for so many seconds a placement, after that, look
    for a proof that nothing is faster, or for what is (see `exact`). report: called now and then.

    With means other than order (`Job.means`) the bound is that without a memory limit.

    Raises ScheduleError or ConfigError where P, v or M do not fit the costs, or not even one
    microbatch fits the memory limit; CostsError where a limit in bytes meets costs without bytes.
    """
    _check_effort(seed, prove_s)
    _check_means(job, jitter, proves=prove_s is not None)
    plain = replace(job, costs=keeping_all(job.costs)) if job.means else job
    _check(plain, proves=prove_s is not None)
    _compile(robust=jitter is not None)
    seed_kernels(seed)
    budget = Budget(limits or Limits(), report)
    random = np.random.default_rng(seed)
    arms = [Arm(one, spans=job.spans) for one in candidates(plain)]
    until = _NOMINAL if jitter is not None or job.means else 1.0
    race = Race(arms, budget, random, until=until)
    race.begin()
    if race.best.best is None and not job.means:
        raise _too_tight(job)
    race.run()
    if prove_s is not None:
        _prove(race, prove_s, budget.is_stopped, spans=job.spans)
    if job.means:
        beyond = search_beyond(job, budget, random, since=_NOMINAL, below_s=race.best.best_s)
        return _found_beyond(job, race, budget, beyond)
    if jitter is None:
        return _found(job, race, budget)
    return _found_hardened(job, race, budget, hardened(race, jitter, budget, seed=seed))


def _check_effort(seed: int, prove_s: float | None) -> None:
    if seed < 0:
        raise ConfigError(f"a seed of {seed}: the nearest legal value is 0")
    if prove_s is not None and not prove_s > 0:  # nor is it a number
        raise ConfigError(f"{prove_s:g} s for a proof: give more than 0, or leave it out")


def _check(job: Job, *, proves: bool) -> None:
    """Refuse what cannot be searched, before kernels are compiled for it."""
    check_numbers(ranks=job.ranks, microbatches=job.microbatches)
    if proves:
        check_provable(most_tokens(job))
    if not fits_one(job) and not job.means:
        raise _too_tight(job)


def _too_tight(job: Job) -> ConfigError:
    return ConfigError(
        f"the memory limit of {job.memory_limit} is too tight for one microbatch: raise it, "
        "or cut the model into more stages"
    )


def _check_means(job: Job, jitter: Jitter | None, *, proves: bool) -> None:
    check_means(job.means, job.costs)
    if job.means and job.memory_limit is None:
        raise ConfigError(
            "activations that leave, or are made again, gain nothing where memory has no limit: "
            "give one"
        )
    if job.means and jitter is not None:
        raise ConfigError(
            "a robust search keeps all activations where they are: leave out either of the two"
        )
    if job.means and proves:
        raise ConfigError(
            "a proof is of schedules that keep all activations where they are: leave out --prove, "
            "or --allow"
        )


def _prove(race: Race, time_s: float, stop: Callable[[], bool], *, spans: bool) -> None:
    """Raise the bounds of the arms that may have something better, or find it."""
    for arm in race.open_arms:
        if stop():
            return
        proof = prove(
            arm.instance,
            below_s=race.best.best_s,
            time_s=time_s,
            spans=spans,
            bound_s=arm.bound_s,
            reach=reach_of(arm.instance),
            stop=stop,
        )
        if proof.tokens is not None:
            value_s = evaluated(arm.instance, proof.tokens, spans=spans)
            if value_s is not None:
                arm.take("proof", proof.tokens, value_s)
        arm.bound_s = max(arm.bound_s, min(proof.bound_s * (1 - CLOSE), race.best.best_s))


def _compile(*, robust: bool) -> None:
    """Compile the kernels, or load them, before any time is counted: once on a machine, 15 s, and
    as long again for those of a robust search.
    """
    costs = Costs.uniform(stages=2, input_grad_s=1.0, weight_grad_s=1.0)
    job = Job(
        costs=costs,
        ranks=1,
        microbatches=1,
        virtual_stages=(2,),
        memory_limit=None,
        spans=False,
    )
    random = np.random.default_rng(0)
    for one in candidates(job):
        arm = Arm(one, spans=False)
        arm.explore(random)
        arm.settle()
        for start in arm.starts(1):
            arm.regrow(start, random, 1)
            arm.cool(start, start.tokens.copy(), 0, 1)
            if robust:
                compile_hardening(arm, start)


def _found(job: Job, race: Race, budget: Budget) -> Found:
    best = race.best
    assert best.best is not None
    return Found(
        schedule=schedule_of(
            best.best,
            best.candidate.placement,
            microbatches=job.microbatches,
            name="found",
        ),
        costs=best.candidate.costs,
        value_s=best.best_s,
        bound_s=race.bound_s,
        named=_best_named(race),
        placements=tuple(arm.candidate.label for arm in race.arms),
        placement=best.candidate.label,
        moves=budget.moves,
        elapsed_s=budget.elapsed_s,
    )


def _found_beyond(job: Job, race: Race, budget: Budget, beyond: Beyond) -> Found:
    """The better of the two; the bound is that without a limit, which is what means may reach."""
    if beyond.best is None:
        if race.best.best is None:
            raise _too_tight(job)
        return replace(_found(job, race, budget), bound_s=min(beyond.bound_s, race.bound_s))
    return Found(
        schedule=beyond.best.schedule,
        costs=beyond.best.costs,
        value_s=beyond.best.value_s,
        bound_s=min(beyond.bound_s, race.bound_s),
        named=_best_named(race),
        placements=tuple(arm.candidate.label for arm in race.arms),
        placement=beyond.placement,
        moves=budget.moves,
        elapsed_s=budget.elapsed_s,
    )


def _best_named(race: Race) -> Named | None:
    named = [one for arm in race.arms for one in arm.candidate.named[:1]]
    return min(named, key=lambda one: one.value_s, default=None)


def _found_hardened(job: Job, race: Race, budget: Budget, best: Hardened) -> Found:
    nominal_s = evaluated(best.arm.instance, best.tokens, spans=job.spans)
    assert nominal_s is not None
    return replace(
        _found(job, race, budget),
        schedule=schedule_of(
            best.tokens,
            best.arm.candidate.placement,
            microbatches=job.microbatches,
            name="found",
        ),
        costs=best.arm.candidate.costs,
        value_s=nominal_s,
        named=best.named,
        placement=best.arm.candidate.label,
        quantile_s=best.quantile_s,
    )
