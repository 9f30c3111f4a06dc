"""Finds a schedule: from the best named ones and a list scheduler's, by local search.

Everything is drawn from one seed in one order, and time decides only when to stop. So a search
that is stopped by its number of moves gives the same schedule on every machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fullbore.cost import Costs
from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.search.bound import lower_bound
from fullbore.search.candidates import Candidate, Job, Named, candidates, evaluated
from fullbore.search.explore import Flow, draw, explore, flow_of, mutate
from fullbore.search.improve import anneal, seed_kernels
from fullbore.search.instance import Work, work_for
from fullbore.search.pattern import repeated, settle
from fullbore.search.tokens import Tokens, schedule_of

__all__ = ["Found", "Limits", "Progress", "search"]

_CLOSE = 1e-9  # this close to the bound a schedule is as good as it can be
_SETTINGS = 200  # list schedules tried at a time
_WAITS = 4000  # waits tried for a steady flow
_STRETCHES = (1.0, 1.3, 1.03, 1.15, 1.08, 1.2, 1.5, 1.25, 2.0)  # of its period
_STARTS = 4  # programs that local search starts from
_ROUND = 20_000  # moves from hot to cold
_STEPS = 20  # temperatures of a round
_HOT, _COLD = 0.3, 0.01  # of the mean action's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: after so many seconds, or moves (a list schedule counts as eight)."""

    time_s: float | None = 10.0
    moves: int | None = None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: seconds and moves spent, best objective and bound, both in seconds."""

    elapsed_s: float
    moves: int
    best_s: float
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule and how good it is.

    costs: those of the schedule's own stages. value_s, bound_s: its objective, and what no
    schedule on any placement that was considered can be below. named: the best named schedule
    that fits, or None. placements: those considered, in words. moves, elapsed_s: what was spent.
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

    @property
    def gap(self) -> float:
        """How far above the best possible the objective is at most, as a share of it."""
        return max(0.0, 1 - self.bound_s / self.value_s) if self.value_s > 0 else 0.0


def search(
    job: Job,
    *,
    limits: Limits | None = None,
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Found:
    """The best schedule found within the limits; never worse than a named one that fits.

    report: called now and then. Raises ConfigError where P, v or M do not fit the costs, or not
    even one microbatch fits the memory limit; CostsError where a limit in bytes meets costs
    without bytes.
    """
    check_numbers(ranks=job.ranks, microbatches=job.microbatches)
    _compile()
    run = _Run(job, limits or Limits(), seed, report)
    run.explore()
    run.improve()
    return run.found()


def _compile() -> None:
    """Compile the kernels, or load them, before any time is counted: once on a machine, 15 s."""
    costs = Costs.uniform(stages=2, input_grad_s=1.0, weight_grad_s=1.0)
    job = Job(
        costs=costs,
        ranks=1,
        microbatches=1,
        virtual_stages=(2,),
        memory_limit=None,
        spans=False,
    )
    run = _Run(job, Limits(time_s=None), 0, lambda progress: None)
    run.step_through()


class _Arm:
    """One placement under search: its best programs so far."""

    def __init__(self, candidate: Candidate, *, spans: bool) -> None:
        self.candidate, self.instance = candidate, candidate.instance
        self.flow: Flow = flow_of(candidate.instance)
        self.work: Work = work_for(candidate.instance)
        self.bound_s = lower_bound(candidate.instance, spans=spans)
        self.best = Tokens.empty(candidate.instance)
        self.best_s = math.inf
        self.starts: dict[str, tuple[float, Tokens]] = {}
        self.stretches = list(_STRETCHES)
        self.settings = np.zeros((0, 9))
        self.values = np.zeros(0)
        durations = candidate.instance.duration_s
        self.unit_s = float(durations[durations > 0].mean()) if durations.any() else 1.0
        if candidate.named:
            self.take("named", candidate.named[0].tokens, candidate.named[0].value_s)

    @property
    def is_done(self) -> bool:
        """Whether nothing better can be found here."""
        return self.best_s <= self.bound_s * (1 + _CLOSE)

    def take(self, source: str, tokens: Tokens, value_s: float) -> None:
        """Keep these programs if they are better than all, or than all from this source."""
        if value_s < self.starts.get(source, (math.inf, tokens))[0]:
            self.starts[source] = (value_s, tokens.copy())
        if value_s < self.best_s:
            self.best, self.best_s = tokens.copy(), value_s


class _Run:
    """One search: the arms, what was spent, and when to stop."""

    def __init__(
        self, job: Job, limits: Limits, seed: int, report: Callable[[Progress], None]
    ) -> None:
        self._job, self._limits, self._report = job, limits, report
        self._began_s = time.monotonic()
        self._moves = 0
        self._random = np.random.default_rng(seed)
        seed_kernels(seed)
        self._arms = [_Arm(one, spans=job.spans) for one in candidates(job)]

    @property
    def _best(self) -> _Arm:
        return min(self._arms, key=lambda arm: arm.best_s)

    @property
    def _bound_s(self) -> float:
        return min(arm.bound_s for arm in self._arms)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _is_over(self, share: float = 1.0) -> bool:
        """Whether this share of what may be spent is spent, or nothing is left to be gained."""
        limits = self._limits
        if limits.time_s is not None and self._elapsed_s() >= share * limits.time_s:
            return True
        if limits.moves is not None and self._moves >= share * limits.moves:
            return True
        best_s = self._best.best_s
        return limits.stop() or best_s <= self._bound_s * (1 + _CLOSE)

    def _spent(self, moves: int) -> None:
        self._moves += moves
        self._report(
            Progress(
                elapsed_s=self._elapsed_s(),
                moves=self._moves,
                best_s=self._best.best_s,
                bound_s=self._bound_s,
            )
        )

    def explore(self) -> None:
        """List schedules for every arm: at random first, then near the best settings."""
        while not self._is_over(0.2) or math.isinf(self._best.best_s):
            for arm in self._arms:
                if not arm.is_done:
                    self._explore(arm)
                if not arm.is_done and arm.stretches:
                    self._settle(arm, arm.stretches.pop(0))
            if math.isinf(self._best.best_s):
                raise ConfigError(_too_tight(self._job))

    def _explore(self, arm: _Arm) -> None:
        if len(arm.settings) == 0:
            drawn = draw(self._random, _SETTINGS)
        else:
            drawn = mutate(self._random, arm.settings, _SETTINGS)
        made = Tokens.empty(arm.instance)
        values = explore(arm.instance, arm.flow, drawn, arm.work, spans=self._job.spans, best=made)
        arm.take("list", made, float(values.min()))
        settings = np.concatenate([arm.settings, drawn])
        values = np.concatenate([arm.values, values])
        chosen = np.argsort(values, kind="stable")[:12]
        arm.settings, arm.values = np.ascontiguousarray(settings[chosen]), values[chosen]
        self._spent(8 * _SETTINGS)

    def _settle(self, arm: _Arm, stretch: float) -> None:
        """A steady flow with this period, as a share of the busiest rank's time."""
        instance, period_s = arm.instance, arm.flow.period_s * stretch
        if period_s == 0.0:
            return
        waits_s, times_s = np.zeros((3, instance.stages)), np.zeros((3, instance.stages))
        chunk = arm.flow.chunk.astype(np.int64)
        excess = settle(instance, period_s, chunk, waits_s, times_s, _WAITS)
        if excess <= 0.0:
            made = repeated(instance, times_s, period_s)
            value_s = evaluated(instance, made, spans=self._job.spans)
            if value_s is not None:
                arm.take("flow", made, value_s)
        self._spent(_WAITS)

    def step_through(self) -> None:
        """Every kernel once, whether it helps or not."""
        for arm in self._arms:
            self._explore(arm)
            self._settle(arm, 1.0)
            self._anneal(arm, arm.best)

    def improve(self) -> None:
        """Local search on the arms, fewer and fewer of them; from each kind of start first."""
        starts = [
            (value_s, arm, tokens)
            for arm in self._arms
            for value_s, tokens in arm.starts.values()
            if arm.bound_s < self._best.best_s
        ]
        starts.sort(key=lambda start: start[0])
        for _, arm, tokens in starts[:_STARTS]:
            if not self._is_over() and not arm.is_done:
                self._anneal(arm, tokens)
        keep = _STARTS
        while not self._is_over():
            keep = max(1, keep // 2)
            arms = [arm for arm in self._arms if not arm.is_done]
            arms = [arm for arm in arms if arm.bound_s < self._best.best_s]
            for arm in sorted(arms, key=lambda arm: arm.best_s)[:keep]:
                if not self._is_over():
                    self._anneal(arm, arm.best)

    def _anneal(self, arm: _Arm, start: Tokens) -> None:
        """One round from these programs, from hot to cold."""
        now = start.copy()
        spans = self._job.spans
        for step in range(_STEPS):
            share = step / (_STEPS - 1)
            best_s = anneal(
                arm.instance,
                now.program,
                now.count,
                spans,
                arm.unit_s * _HOT * (_COLD / _HOT) ** share,
                _ROUND // _STEPS,
                arm.bound_s * (1 + _CLOSE),
                arm.best.program,
                arm.best.count,
                arm.best_s,
                arm.work,
            )
            arm.best_s = float(best_s)
            self._spent(_ROUND // _STEPS)
            if self._is_over() or arm.is_done:
                return

    def found(self) -> Found:
        """The result."""
        best = self._best
        named = [one for arm in self._arms for one in arm.candidate.named[:1]]
        return Found(
            schedule=schedule_of(
                best.best,
                best.candidate.placement,
                microbatches=self._job.microbatches,
                name="found",
            ),
            costs=best.candidate.costs,
            value_s=best.best_s,
            bound_s=self._bound_s,
            named=min(named, key=lambda one: one.value_s, default=None),
            placements=tuple(arm.candidate.label for arm in self._arms),
            placement=best.candidate.label,
            moves=self._moves,
            elapsed_s=self._elapsed_s(),
        )


def _too_tight(job: Job) -> str:
    return (
        f"the memory limit of {job.memory_limit} is too tight for one microbatch: raise it, or "
        "cut the model into more stages"
    )
