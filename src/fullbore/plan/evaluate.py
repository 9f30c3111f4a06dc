"""What a choice comes to: simulated under its own stages' costs, with what a planner asks of it.

What several choices share is worked out once: prices of a spread, stages of a split, schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fullbore.cost import Costs, StageCosts
from fullbore.errors import ConfigError
from fullbore.plan.choice import NONE, Choice, Spread
from fullbore.plan.load import Load, load_of, states_of
from fullbore.plan.memory import Memory, memory_of, peak_bytes
from fullbore.plan.prices import Floats, Prices, Row, layout_of, prices_of
from fullbore.plan.programs import Program, Programs
from fullbore.plan.question import Question
from fullbore.plan.splits import Room, balanced, within_room
from fullbore.plan.step import Step, bound_s, step_of

__all__ = ["Evaluated", "Evaluator"]

_MOST_LOADS = 4_000  # kept at once: tens of MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A choice, its layers named, and what it comes to.

    step_s: seconds of a step. peak_bytes: of the rank that holds the most, worst_rank. fits:
    whether that is within the limit.
    """

    choice: Choice
    step_s: float
    peak_bytes: float
    worst_rank: int
    fits: bool

    @property
    def order(self) -> tuple[float, float]:
        """Faster first, then the one that takes less memory."""
        return self.step_s, self.peak_bytes


class Evaluator:
    """Evaluates choices for one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.programs = Programs()
        self.simulated = 0
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._loads: dict[tuple[object, ...], Load] = {}
        self._balanced: dict[tuple[object, ...], tuple[int, ...]] = {}

    def prices(self, spread: Spread) -> Prices:
        """The prices under a spread; ConfigError where it does not divide the model."""
        key = (spread.split, spread.microbatch_size)
        if key not in self._prices:
            self._prices[key] = prices_of(self.question, spread)
        return self._prices[key]

    def with_layers(self, choice: Choice) -> Choice:
        """The choice with the split of its layers that cost decides, where it names none.

        Raises ConfigError where there are more stages than layers.
        """
        self._check_stages(choice)
        if choice.layers is not None:
            return choice
        spread = choice.spread
        whole = choice.recompute if choice.recompute.layers is None else NONE
        key = (spread.split, spread.microbatch_size, choice.stages, whole)
        if key not in self._balanced:
            costs = self.prices(spread).costs(whole)
            self._balanced[key] = balanced(costs, stages=choice.stages)
        return replace(choice, layers=self._balanced[key])

    def _check_stages(self, choice: Choice) -> None:
        layers = len(self.question.shape.layers)
        if choice.layers is None and choice.stages > layers:
            raise ConfigError(
                f"P={choice.spread.pipeline} x v={choice.virtual_stages} are {choice.stages} "
                f"stages, and the model has {layers} layers: use v = "
                f"{max(1, layers // choice.spread.pipeline)} or less"
            )
        if choice.layers is not None and len(choice.layers) != choice.stages:
            raise ConfigError(
                f"--stage-layers has {len(choice.layers)} stages, and P={choice.spread.pipeline} x "
                f"v={choice.virtual_stages} are {choice.stages}: give as many"
            )

    def load(self, choice: Choice) -> Load:
        """The load of a choice with layers."""
        assert choice.layers is not None
        spread, home = choice.spread, self.programs.outline(choice).home
        key = (spread, choice.recompute, choice.layers, home)
        if key not in self._loads:
            if len(self._loads) >= _MOST_LOADS:
                self._loads.clear()
            prices = self.prices(spread)
            sums = prices.sums(choice.layers, choice.recompute)
            self._loads[key] = load_of(self.question, spread, prices, sums, home)
        return self._loads[key]

    def held(self, choice: Choice) -> Floats:
        """The most that each rank holds [P], bytes; exact without a clock."""
        rehearsal = self.programs.of(choice).rehearsal
        return peak_bytes(self.load(choice), rehearsal, self.question.allowance)

    def bound_s(self, choice: Choice) -> float:
        """What a choice's step cannot be shorter than."""
        return bound_s(self.load(choice), splits=self.programs.outline(choice).splits)

    def step(self, choice: Choice) -> Step:
        """Simulate a choice with layers."""
        self.simulated += 1
        rehearsal = self.programs.of(choice).rehearsal
        return step_of(self.load(choice), rehearsal, overlap=self.question.overlap_messages)

    def evaluate(self, choice: Choice) -> Evaluated:
        """Simulate a choice; ConfigError or ScheduleError where it does not exist."""
        made = self.with_layers(choice)
        return self.judged(made, self.held(made), step_s=self.step(made).total_s)

    def judged(self, choice: Choice, held: Floats, *, step_s: float) -> Evaluated:
        """A choice whose ranks hold these bytes [P]."""
        worst = int(np.argmax(held))
        peak = float(held[worst])
        return Evaluated(
            choice=choice,
            step_s=step_s,
            peak_bytes=peak,
            worst_rank=worst,
            fits=peak <= self.question.limit_bytes,
        )

    def memory(self, choice: Choice) -> Memory:
        """The memory of every rank, by what holds it."""
        rehearsal = self.programs.of(choice).rehearsal
        return memory_of(self.load(choice), rehearsal, self.question.allowance)

    def costs(self, choice: Choice) -> Costs:
        """The choice's stages as the costs that simulator, search and pictures take."""
        load = self.load(choice)
        sums = load.sums
        layout = layout_of(self.question, choice.spread)
        return Costs(
            stages=tuple(
                StageCosts(
                    forward_s=float(sums[Row.F][s]),
                    backward_s=float(sums.seconds[1][s]),
                    input_grad_s=float(sums[Row.I][s]),
                    weight_grad_s=float(sums[Row.W][s]),
                    activation_bytes=float(sums[Row.KEPT][s]),
                    input_grad_held_bytes=float(sums[Row.HELD][s]),
                )
                for s in range(len(load.home))
            ),
            hop_s=layout.hop_s,
            message_bytes=self.prices(choice.spread).message_bytes,
            bandwidth_bytes_per_s=layout.hop_bytes_per_s,
            offload_bytes_per_s=self.question.cluster.device.host_bytes_per_s,
        )

    def split_within_room(self, choice: Choice) -> Choice | None:
        """The choice with the best split whose ranks fit their memory; None where none is found."""
        if choice.recompute.layers is not None:
            return None
        prices, program = self.prices(choice.spread), self.programs.of(choice)
        items = prices.items(choice.recompute)
        costs = prices.costs(choice.recompute)
        layers = within_room(
            costs, items, self._room(choice, program, float(items[Row.SCRATCH].max()))
        )
        return None if layers is None else replace(choice, layers=layers)

    def _room(self, choice: Choice, program: Program, scratch: float) -> Room:
        question, allowance = self.question, self.question.allowance
        dense, expert = states_of(question, choice.spread)
        lost = 1 + allowance.fragmented
        buffers = self.load(self.with_layers(choice)).buffers
        free = question.limit_bytes - allowance.context_bytes - lost * (buffers + scratch)
        return Room(
            home=np.array(program.outline.home),
            live=tuple(tuple((lost * a, lost * b) for a, b in pairs) for pairs in program.live),
            dense_bytes=dense.bytes,
            expert_bytes=expert.bytes,
            limits=tuple(free.tolist()),
        )
