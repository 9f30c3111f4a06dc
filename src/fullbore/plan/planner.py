"""The planner: every candidate simulated, but for those that provably cannot matter.

A candidate is left out only where a lower bound on its step is above the slowest plan that would be
shown, and either a plan that takes no more memory is faster than that bound, or the bound is beyond
`SLOWEST` times the best step, where the picture of memory against time ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fullbore.cost.model import Recompute
from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.choice import NONE, Choice, Spread
from fullbore.plan.counts import Counts
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.found import Effort, searched
from fullbore.plan.front import Front
from fullbore.plan.neighbours import faster
from fullbore.plan.prices import Floats
from fullbore.plan.question import Question
from fullbore.plan.refine import refined
from fullbore.plan.space import (
    can_recompute,
    cheap_recomputes,
    check_engines,
    choices,
    recomputes,
    spreads,
)
from fullbore.plan.ungiven import relieving

__all__ = ["SLOWEST", "Plan", "Progress", "plan"]

SLOWEST = 2.0

_REFINED = 3  # how many of the best get their layers moved one by one
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far planning is: spreads done, of how many; simulations; the best step so far."""

    done: int
    spreads: int
    simulated: int
    best_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best plans, fastest first, one for each spread and schedule; all of them fit.

    known: the fastest of each spread and schedule that was looked at. front: plans that none beats
    in both memory and time. counts: how much was looked at. complete: whether all of it was.
    """

    question: Question
    best: tuple[Evaluated, ...]
    known: Mapping[tuple[Spread, str], Evaluated]
    front: tuple[Evaluated, ...]
    counts: Counts
    complete: bool
    evaluator: Evaluator

    @property
    def winner(self) -> Evaluated:
        """The fastest."""
        return self.best[0]


def plan(
    question: Question,
    *,
    top: int = 10,
    effort: Effort | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The fastest ways to train the model on the cluster.

    top: how many to tell apart. effort: how long to search for schedules that have no name, for
    the best few plans; not at all if not given. report: called now and then. stop: asked often;
    where it says so, the plan is the best so far.

    Raises ConfigError where nothing can be tried or nothing fits, saying what would do.
    """
    if top < 1:
        raise ConfigError(f"--top {top}: it must be 1 or more")
    if effort is not None and effort.any:
        _check_searchable(question)
    check_engines(question)
    planner = _Planner(question, top=top)
    complete = planner.run(report, stop)
    planner.improve(stop)
    if effort is not None and effort.any:
        planner.search(effort, stop)
    return planner.plan(complete=complete and not stop())


class _Planner:
    """The state of one planning run."""

    def __init__(self, question: Question, *, top: int) -> None:
        self.question, self.top = question, top
        self.limit_bytes = question.limit_bytes
        self.evaluator = Evaluator(question)
        self.cheap = cheap_recomputes(question)
        self.front = Front()
        self.kept: dict[tuple[Spread, str], Evaluated] = {}
        self.least: Evaluated | None = None  # of those that do not fit, the smallest
        self.refused: str | None = None  # why the first choice that does not exist does not
        self.counts = Counts()
        self._slowest_shown_s = float("inf")

    def run(self, report: Callable[[Progress], None], stop: Callable[[], bool]) -> bool:
        """Consider everything; False where it was stopped."""
        found = spreads(self.question)
        order = sorted(found, key=self.floor_s)
        self.counts.spreads = len(order)
        for done, spread in enumerate(order):
            report(self._progress(done, len(order)))
            if self._is_hopeless(self.floor_s(spread)):
                self.counts.spreads_pruned += 1
                continue
            for choice in choices(self.question, spread):
                if stop():
                    return False
                self.consider(choice)
        report(self._progress(len(order), len(order)))
        return True

    def floor_s(self, spread: Spread) -> float:
        """What no step of a spread can be shorter than: all work, shared evenly."""
        costs = self.evaluator.prices(spread).costs(NONE)
        once = float(costs.sum()) / spread.pipeline
        return once * spread.microbatches * (1 - _ROUNDING)

    def consider(self, choice: Choice) -> None:
        """All recomputations of a choice, and whatever makes it fit where it does not as it is."""
        try:
            for recompute in recomputes(self.question):
                self._consider(replace(choice, recompute=recompute))
        except (ConfigError, ScheduleError) as error:
            # No such schedule of these numbers: reasons are given for neighbours, and if none is.
            self.refused = self.refused or str(error)

    def _consider(self, choice: Choice) -> None:
        made = self.evaluator.with_layers(choice)
        if self._is_hopeless(self.evaluator.bound_s(made)):
            self.counts.pruned += 1
            return
        held = self.evaluator.held(made)
        if float(held.max()) <= self.limit_bytes:
            self._simulate(made, held)
            return
        self.counts.too_large += 1
        one = self.evaluator.judged(made, held, step_s=float("inf"))
        if self.least is None or one.peak_bytes < self.least.peak_bytes:
            self.least = one
        if not self._is_hopeless(self.floor_s(choice.spread)):
            self._rescue(choice, made, held)

    def _rescue(self, choice: Choice, made: Choice, held: Floats) -> None:
        """Other layers for each stage, or cheap modules or as few layers again as it takes.

        Where the ranks do not fit even on average, moving layers between them is not tried.
        """
        if choice.layers is None and float(held.mean()) <= self.limit_bytes:
            other = self.evaluator.split_within_room(choice)
            if other is not None:
                self._consider_variant(other)
        if choice.recompute == NONE and self.question.fixed.recompute is None:
            for cheap in self.cheap:
                least = self.evaluator.prices(made.spread).least_kept(cheap)
                if float(held.max()) * least <= self.limit_bytes:
                    self._consider_variant(replace(made, recompute=cheap))
            self._recompute_some(made)

    def _recompute_some(self, made: Choice) -> None:
        """The least number of layers a stage: fewer take more memory, more take more time."""
        assert made.layers is not None
        low, high = 1, max(made.layers)
        if not can_recompute(self.question, _again(made, high).recompute):
            return
        if not self._fits(_again(made, high)):
            return
        while low < high:
            middle = (low + high) // 2
            if self._fits(_again(made, middle)):
                high = middle
            else:
                low = middle + 1
        if low < max(made.layers):
            self._consider_variant(_again(made, low))

    def _fits(self, made: Choice) -> bool:
        return float(self.evaluator.held(made).max()) <= self.limit_bytes

    def _consider_variant(self, made: Choice) -> None:
        held = self.evaluator.held(made)
        if float(held.max()) <= self.limit_bytes:
            self._simulate(made, held)
        else:
            self.counts.too_large += 1

    def _simulate(self, made: Choice, held: Floats) -> None:
        bound_s, most = self.evaluator.bound_s(made), float(held.max())
        if bound_s > self._slowest_shown_s and (
            self._is_hopeless(bound_s) or self.front.is_beaten(peak_bytes=most, step_s=bound_s)
        ):
            self.counts.pruned += 1
            return
        self.counts.simulated += 1
        step_s = self.evaluator.step(made).total_s
        self.keep(self.evaluator.judged(made, held, step_s=step_s))

    def keep(self, one: Evaluated) -> None:
        """Remember a plan that fits."""
        self.front.add(one)
        key = one.choice.spread, one.choice.schedule
        before = self.kept.get(key)
        if before is None or one.order < before.order:
            self.kept[key] = one
            if one.step_s < self._slowest_shown_s:
                shown = sorted(other.step_s for other in self.kept.values())[: self.top]
                if len(shown) == self.top:
                    self._slowest_shown_s = shown[-1]

    def _is_hopeless(self, bound_s: float) -> bool:
        """Whether a step this long is beyond both the table and the picture."""
        best_s = self.front.members[-1].step_s if self.front.members else float("inf")
        return bound_s > max(self._slowest_shown_s, SLOWEST * best_s)

    def _progress(self, done: int, total: int) -> Progress:
        members = self.front.members
        return Progress(
            done=done,
            spreads=total,
            simulated=self.evaluator.simulated,
            best_s=members[-1].step_s if members else None,
        )

    def plan(self, *, complete: bool) -> Plan:
        """What came of it; ConfigError where nothing fits."""
        if not self.kept:
            raise self._nothing_fits(complete=complete)
        return Plan(
            question=self.question,
            best=self._best()[: self.top],
            known=dict(self.kept),
            front=self.front.members,
            counts=replace(self.counts, simulations=self.evaluator.simulated),
            complete=complete,
            evaluator=self.evaluator,
        )

    def improve(self, stop: Callable[[], bool]) -> None:
        """Improve the best few by single layers, and the best by single numbers, to the end."""
        for one in self._best()[:_REFINED]:
            self.keep(self._refined(one, stop))
        while self.kept and not stop():
            better = faster(self.evaluator, self._best()[0])
            if better is None:
                return
            self.keep(self._refined(better, stop))

    def search(self, effort: Effort, stop: Callable[[], bool]) -> None:
        """Search for schedules of the best plan of each of the best few spreads."""
        of_spread: dict[Spread, Evaluated] = {}
        for one in self._best():
            of_spread.setdefault(one.choice.spread, one)
        chosen = list(of_spread.values())[:_REFINED]
        limits = effort.shared(len(chosen), stop) if chosen else None
        for number, one in enumerate(chosen, start=1):
            if limits is None or stop():
                return
            found = searched(self.evaluator, one, limits, name=f"found-{number}")
            if found is not None and found.order < one.order:
                self.keep(found)

    def _refined(self, one: Evaluated, stop: Callable[[], bool]) -> Evaluated:
        return one if self.question.fixed.layers else refined(self.evaluator, one, stop)

    def _best(self) -> tuple[Evaluated, ...]:
        return tuple(sorted(self.kept.values(), key=lambda one: one.order))

    def _nothing_fits(self, *, complete: bool) -> ConfigError:
        if not complete:
            return ConfigError("stopped before any plan was found")
        limit = self.limit_bytes / 2**30
        if self.least is None:
            return ConfigError(
                "no schedule of these numbers exists: "
                + (f"{self.refused}; or " if self.refused else "")
                + "leave out --schedule, --num-virtual-stages-per-pipeline-rank, "
                "--microbatch-group-size-per-virtual-pipeline-stage or --stage-layers"
            )
        least, spread = self.least, self.least.choice.spread
        relief = relieving(self.question)
        told = "" if relief is None else f"{relief.text}; or "
        return ConfigError(
            f"no plan fits {limit:.4g} GiB a device: the smallest, P={spread.pipeline} "
            f"TP={spread.tensor} --micro-batch-size {spread.microbatch_size} "
            f"{least.choice.schedule}, needs {least.peak_bytes / 2**30:.4g} GiB on rank "
            f"{least.worst_rank}: {told}use more devices, ones with more memory, or fix fewer "
            "flags (recomputation, optimizer sharding)"
        )


def _check_searchable(question: Question) -> None:
    fixed = question.fixed
    unable = next((engine for engine in fixed.engines if not engine.from_file), None)
    if fixed.schedules is not None or unable is not None:
        reason = "--schedule names some" if unable is None else f"{unable.title} has none of them"
        raise ConfigError(
            "--search-time and --search-iterations look for schedules that have no name, and "
            f"{reason}: leave out either"
        )


def _again(made: Choice, layers: int) -> Choice:
    """The same with the first layers of each stage computed again."""
    return replace(made, recompute=Recompute(granularity="full", layers=layers))
