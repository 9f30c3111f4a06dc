"""Constraint programming: small schedules proved best, or their lower bound raised.

Needs OR-tools (`pip install 'fullbore[search]'`). Times become whole numbers, exactly where some
power of ten or two makes them so, else rounded down; memory is rounded down against a limit rounded
up. So whatever the solver proves holds for the true costs, too. Link order is left free, which can
only help. What it finds is evaluated like any programs.

Half of the time it looks for the best schedule at once. If that is not enough, a bound is raised
step by step: that nothing is shorter than half way between the bound and the best known is much
easier to prove than that nothing is shorter than the best, since everything has less room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullbore.errors import ConfigError
from fullbore.search.bound import Reach
from fullbore.search.instance import Instance
from fullbore.search.tokens import Tokens

__all__ = ["MOST_TOKENS", "Proof", "check_provable", "prove"]

MOST_TOKENS = 2000
"""Beyond this many actions a proof is out of reach, and only the model would take minutes."""

_UNITS = 2_000_000  # whole numbers that the best known schedule is long, where none is exact
_MOST_UNITS = 5_000_000  # ... and where one is
_EXACT = (1, 2, 4, 8, 16, 10, 20, 40, 80, *(10**power for power in range(2, 8)))
_BYTES = 1_000_000  # ... and that the limit of a rank is large
_ROUNDING = 1e-9
_NEAR = 1e-5  # a gap that is not worth another step, as a share
_STEP = 0.5  # of the time that is left, for a step ...
_LEAST = 0.05  # ... until no more than this share of all is left
_POLL_S = 0.1  # how often to ask whether to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the solver can say: a bound in seconds, and programs where it found some.

    value_s: about how long these take. is_final: more time would not change it.
    """

    bound_s: float
    tokens: Tokens | None = None
    value_s: float = math.inf
    is_final: bool = True


def check_provable(size: int) -> None:
    """Raise ConfigError where OR-tools is not installed, or so many actions are too many for it."""
    _solver()
    if size > MOST_TOKENS:
        raise ConfigError(
            f"the schedule has {size} actions, and proofs are for {MOST_TOKENS} at the most: leave "
            "--prove out, or choose a smaller M"
        )


def prove(
    instance: Instance,
    *,
    below_s: float,
    time_s: float,
    spans: bool,
    bound_s: float = 0.0,
    reach: Reach | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Proof:
    """Look for programs whose objective is at most below_s, or for a proof that there are none.

    bound_s, reach: what is known of any schedule's objective, and of when actions can begin; the
    latter makes proofs of makespans ten and more times faster. Without them the solver does not
    rely on what this package thinks. stop: asked now and then. On one core. For what
    `check_provable` lets through.
    """
    ends_s = time.monotonic() + time_s
    proof = _Model(instance, below_s, reach, spans=spans).solve(_STEP * time_s, stop)
    low_s, high_s = max(bound_s, proof.bound_s), min(below_s, proof.value_s)
    while not proof.is_final and high_s - low_s > _NEAR * high_s:
        left_s = ends_s - time.monotonic()
        if left_s < _LEAST * time_s or stop():
            break
        middle_s = (low_s + high_s) / 2
        step = _Model(instance, middle_s, reach, spans=spans).solve(_STEP * left_s, stop)
        low_s = max(low_s, step.bound_s)
        if step.tokens is not None:
            proof = step
        if not step.is_final:
            high_s = min(middle_s, step.value_s)
    return replace(proof, bound_s=low_s)


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "proofs need OR-tools: pip install 'fullbore[search]', or leave --prove out"
        ) from None
    return cp_model


class _Model:
    """The schedule of one instance as constraints on whole numbers."""

    def __init__(
        self, instance: Instance, below_s: float, reach: Reach | None, *, spans: bool
    ) -> None:
        self._cp, self._instance, self._spans = _solver(), instance, spans
        self._model: Any = self._cp.CpModel()
        self._below_s, self._reach = below_s, None if spans else reach
        self._per_s = _units_per_s(instance, below_s)
        self._most = math.ceil(below_s * self._per_s * (1 + _ROUNDING))
        # All inputs have come back to the first rank within its span; of the others, which began
        # after it, some may have a W to do after that.
        self._horizon = 2 * self._most + self._units(instance.lead_s) if spans else self._most
        self._lead = self._units(instance.lead_s)
        self._hop = self._units(instance.hop_s)
        self._occupancy = self._units(instance.occupancy_s)
        self._steps: dict[tuple[int, int, int], tuple[Any, Any, Any]] = {}
        self._whole: dict[tuple[int, int], Any] = {}
        self._messages: dict[int, list[Any]] = {}
        self._build()

    def _units(self, seconds: float) -> int:
        return math.floor(seconds * self._per_s + 1e-6)

    def _step(self, stage: int, kind: int, microbatch: int, present: Any | None) -> None:
        """An action, with the host time before it."""
        length = self._units(float(self._instance.duration_s[stage * 4 + kind])) + self._lead
        start = self._model.new_int_var(*self._window(stage, kind, microbatch), "")
        end = self._model.new_int_var(0, self._horizon, "")
        if present is None:
            interval = self._model.new_interval_var(start, length, end, "")
        else:
            interval = self._model.new_optional_interval_var(start, length, end, present, "")
        self._steps[stage, kind, microbatch] = start, end, interval

    def _window(self, stage: int, kind: int, microbatch: int) -> tuple[int, int]:
        """The first and the last time at which an action may start."""
        if self._reach is None:
            return 0, self._horizon
        cell = (min(kind, 1), stage, microbatch)
        early_s, late = float(self._reach.early_s[cell]), self._horizon
        if kind == 3:
            early_s += float(self._instance.duration_s[stage * 4 + 2])  # of its I
        else:
            late_s = self._below_s - float(self._reach.late_s[cell])
            late = math.ceil(late_s * self._per_s + _ROUNDING * self._most)
        early = min(math.floor(early_s * self._per_s * (1 - _ROUNDING)), self._horizon)
        return early, min(max(early, late), self._horizon)

    def _build(self) -> None:
        instance, model = self._instance, self._model
        cells = [(s, m) for s in range(instance.stages) for m in range(instance.microbatches)]
        for s, m in cells:
            whole = model.new_bool_var("") if instance.splits else None
            self._whole[s, m] = whole
            self._step(s, 0, m, None)
            self._step(s, 1, m, whole)
            if whole is not None:
                self._step(s, 2, m, whole.negated())
                self._step(s, 3, m, whole.negated())
        for s, m in cells:
            self._follow(s, m)
        for rank in range(instance.ranks):
            own = instance.own[instance.first[rank] : instance.first[rank + 1]].tolist()
            model.add_no_overlap(
                [interval for (s, _, _), (_, _, interval) in self._steps.items() if s in own]
            )
            self._remember(rank, own)
        for intervals in self._messages.values():
            model.add_no_overlap(intervals)
        self._minimize()

    def _backwards(self, s: int, m: int) -> list[tuple[Any, Any, Any]]:
        """Start, end and presence of the backward, of either kind."""
        whole = self._whole[s, m]
        start, end, _ = self._steps[s, 1, m]
        if whole is None:
            return [(start, end, None)]
        half_start, half_end, _ = self._steps[s, 2, m]
        return [(start, end, whole), (half_start, half_end, whole.negated())]

    def _after(self, later: Any, earlier: Any, present: Any | None) -> None:
        constraint = self._model.add(later >= earlier)
        if present is not None:
            constraint.only_enforce_if(present)

    def _follow(self, s: int, m: int) -> None:
        """What one cell waits for: its input, its forward, its predecessor of the same kind."""
        start, end, _ = self._steps[s, 0, m]
        if s > 0:
            made = [(self._steps[s - 1, 0, m][1], None)]
            self._after(start, self._arrival(s - 1, 0, made), None)
        arrived = None
        if s < self._instance.stages - 1:
            ends = [(one_end, present) for _, one_end, present in self._backwards(s + 1, m)]
            arrived = self._arrival(s + 1, 1, ends)
        for begin, _, present in self._backwards(s, m):
            self._after(begin, end, present)
            if arrived is not None:
                self._after(begin, arrived, present)
        if self._instance.splits:
            split = self._whole[s, m].negated()
            self._after(self._steps[s, 3, m][0], self._steps[s, 2, m][1], split)
            if m > 0:
                both = [split, self._whole[s, m - 1].negated()]
                self._after(self._steps[s, 3, m][0], self._steps[s, 3, m - 1][1], both)
        if m > 0:
            self._after(start, self._steps[s, 0, m - 1][1], None)
            for begin, _, present in self._backwards(s, m):
                for _, before_end, before in self._backwards(s, m - 1):
                    enforced = [one for one in (present, before) if one is not None]
                    self._after(begin, before_end, enforced or None)

    def _arrival(self, stage: int, way: int, made: list[tuple[Any, Any]]) -> Any:
        """When what a stage has made is there for the next one."""
        channel = int(self._instance.link[way, stage])
        left = self._model.new_int_var(0, self._horizon, "")
        if channel < 0:
            for end, present in made:
                self._after(left, end, present)
            return left
        entered = self._model.new_int_var(0, self._horizon, "")
        for end, present in made:
            self._after(entered, end, present)
        if self._occupancy:
            message = self._model.new_interval_var(entered, self._occupancy, left, "")
            self._messages.setdefault(channel, []).append(message)
        else:
            self._after(left, entered, None)
        return left + self._hop

    def _remember(self, rank: int, own: list[int]) -> None:
        """Memory: what each cell of the rank holds, from its F to its B or W."""
        instance = self._instance
        limit = float(instance.limit[rank])
        intervals, demands = [], []

        def hold(begin: Any, end: Any, present: Any | None, amount: float) -> None:
            units = math.floor(amount / limit * _BYTES) if limit > 0 else 0
            if units <= 0:
                return
            length = self._model.new_int_var(0, self._horizon, "")
            make = self._model.new_optional_interval_var
            shown = self._model.new_constant(1) if present is None else present
            intervals.append(make(begin, length, end, shown, ""))
            demands.append(units)

        for s in own:
            kept, risen = instance.change[s * 4], instance.rise[s * 4 + 1]
            for m in range(instance.microbatches):
                begun = self._steps[s, 0, m][0]
                for start, end, present in self._backwards(s, m):
                    hold(begun, end, present, kept)
                    hold(start, end, present, risen)
                if instance.splits:
                    halved = -instance.change[s * 4 + 3]
                    split = self._whole[s, m].negated()
                    hold(self._steps[s, 2, m][1], self._steps[s, 3, m][1], split, halved)
        self._model.add_cumulative(intervals, demands, _BYTES + 1)

    def _minimize(self) -> None:
        instance, model = self._instance, self._model
        self._goal = model.new_int_var(0, self._most, "")
        for rank in range(instance.ranks):
            own = instance.own[instance.first[rank] : instance.first[rank + 1]].tolist()
            began = self._steps[own[0], 0, 0][0] + self._lead if self._spans else 0
            for (s, kind, m), (_, end, _) in self._steps.items():
                if s in own and kind in (1, 3):
                    whole = self._whole[s, m]
                    present = whole if kind == 1 else whole.negated()
                    self._after(self._goal, end - began, present)
        model.minimize(self._goal)

    def solve(self, time_s: float, stop: Callable[[], bool]) -> Proof:
        """One worker and one seed; where it ends before its time, it gives the same again.

        The solver runs beside this thread, which alone hears Ctrl-C, and not while it is in C++.
        """
        solver: Any = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = time_s
        # Relaxations say little of orders, and propagation much: measured, three times as quick.
        solver.parameters.linearization_level = 0
        solver.parameters.use_dynamic_precedence_in_disjunctive = True
        solver.parameters.use_strong_propagation_in_disjunctive = True
        solver.parameters.catch_sigint_signal = False
        with ThreadPoolExecutor(1) as beside:
            solving = beside.submit(solver.solve, self._model)
            try:
                while wait([solving], _POLL_S).not_done and not stop():
                    pass
            finally:  # also where a second Ctrl-C is not to be waited for
                solver.stop_search()
            status = solving.result()
        bound_s = max(0.0, solver.best_objective_bound) / self._per_s
        if status == self._cp.INFEASIBLE:
            return Proof(bound_s=self._most / self._per_s)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return Proof(bound_s=bound_s, is_final=False)
        return Proof(
            bound_s=bound_s,
            tokens=self._read(solver),
            value_s=solver.objective_value / self._per_s,
            is_final=status == self._cp.OPTIMAL,
        )

    def _read(self, solver: Any) -> Tokens:
        """The solver's order as programs."""
        made = Tokens.empty(self._instance)
        for rank in range(self._instance.ranks):
            own = self._instance.own[self._instance.first[rank] : self._instance.first[rank + 1]]
            present = []
            for (s, kind, m), (start, _, _) in self._steps.items():
                whole = self._whole[s, m]
                is_whole = whole is None or bool(solver.boolean_value(whole))
                if s in own and (kind == 0 or (kind == 1) == is_whole):
                    present.append((solver.value(start), m, (kind > 0) + (kind == 3), s * 4 + kind))
            present.sort()
            made.program[rank, : len(present)] = np.array([one[3] for one in present])
            made.count[rank] = len(present)
        return made


def _units_per_s(instance: Instance, below_s: float) -> float:
    """Whole numbers in a second: such that nothing needs rounding, if there is a small one."""
    known = [*instance.duration_s, instance.lead_s, instance.hop_s, instance.occupancy_s]
    for units in _EXACT:
        scaled = np.array(known) * units
        if below_s * units <= _MOST_UNITS and np.abs(scaled - np.round(scaled)).max() < 1e-7:
            return float(units)
    return _UNITS / below_s if below_s > 0 else 1.0
