"""Schedules by their numbers, built and made ready once, however many candidates use them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.errors import ScheduleError
from fullbore.ir import Schedule
from fullbore.passes import strip_communication
from fullbore.plan.choice import Choice
from fullbore.schedules import FAMILIES, Family, build
from fullbore.sim import Rehearsal

__all__ = ["RUNNABLE", "Outline", "Program", "Programs", "family_of", "groups"]

Floats = npt.NDArray[np.float64]

# The engine runs these, on whole sequences.
RUNNABLE: tuple[Family, ...] = tuple(f for f in FAMILIES if f.runs and not f.takes_slices)

_MOST_ACTIONS = 3_000_000  # kept ready at once: some 400 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a schedule before it is built: it does not depend on M (tested).

    splits: whether it has split backwards. home [S]: the rank of each stage.
    """

    splits: bool
    home: tuple[int, ...]

    @staticmethod
    def of(schedule: Schedule) -> Outline:
        """The outline of a schedule."""
        return Outline(splits=schedule.splits_backward, home=schedule.placement.stage_to_rank)


class Program:
    """A schedule ready to be simulated."""

    def __init__(self, schedule: Schedule) -> None:
        compute = strip_communication(schedule)
        self.schedule = compute
        self.rehearsal = Rehearsal(compute)
        self.outline = Outline.of(compute)

    @cached_property
    def live(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank the pairs, none below another, of how many microbatches of a stage it holds
        at once between F and the backward, and between I and W.
        """
        ones, zero = np.ones(self.schedule.stages), np.zeros(self.schedule.stages)
        kept = self.rehearsal.levels(
            np.stack([ones, zero, zero, zero]), np.stack([ones, -ones, -ones, zero])
        )
        held = self.rehearsal.levels(
            np.stack([zero, zero, zero, zero]), np.stack([zero, zero, ones, -ones])
        )
        bounds = [*self.rehearsal.first.tolist(), len(kept)]
        return tuple(
            _outermost(kept[first:last], held[first:last]) for first, last in pairwise(bounds)
        )


def _outermost(kept: Floats, held: Floats) -> tuple[tuple[float, float], ...]:
    """Of many pairs those that no other one exceeds in both."""
    pairs: list[tuple[float, float]] = []
    for a, b in sorted(set(zip(kept.tolist(), held.tolist(), strict=True)), reverse=True):
        if not pairs or b > pairs[-1][1]:
            pairs.append((a, b))
    return tuple(pairs)


class Programs:
    """The schedules that candidates ask for; the least recently used ones are let go.

    found: schedules that were searched for, by the name that choices give them.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._found: dict[str, Program] = {}
        self._bases: dict[str, Choice] = {}
        self._outlines: dict[tuple[str, int, int], Outline] = {}
        self._actions = 0

    def add(self, name: str, schedule: Schedule, *, base: Choice) -> None:
        """Let choices name a schedule that was found for the stages of another choice."""
        self._found[name] = Program(schedule)
        self._bases[name] = base

    def base(self, choice: Choice) -> Choice:
        """The choice with a named schedule that a found one began as; a named one is its own."""
        return self._bases.get(choice.schedule, choice)

    def outline(self, choice: Choice) -> Outline:
        """The outline of a choice's schedule, built for a single microbatch."""
        if choice.schedule in self._found:
            return self._found[choice.schedule].outline
        key = choice.schedule, choice.spread.pipeline, choice.virtual_stages
        if key not in self._outlines:
            small = replace(choice.spread, microbatches=1)
            self._outlines[key] = Outline.of(_built(replace(choice, spread=small, group=None)))
        return self._outlines[key]

    def of(self, choice: Choice) -> Program:
        """The schedule of a choice; ScheduleError where there is none of these numbers."""
        if choice.schedule in self._found:
            return self._found[choice.schedule]
        spread = choice.spread
        key = (
            choice.schedule,
            spread.pipeline,
            spread.microbatches,
            choice.virtual_stages,
            choice.group,
        )
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        program = Program(_built(choice))
        self._actions += program.rehearsal.actions
        while self._kept and self._actions > _MOST_ACTIONS:
            _, dropped = self._kept.popitem(last=False)
            self._actions -= dropped.rehearsal.actions
        self._kept[key] = program
        return program


def _built(choice: Choice) -> Schedule:
    return build(
        choice.schedule,
        ranks=choice.spread.pipeline,
        microbatches=choice.spread.microbatches,
        virtual_stages=choice.virtual_stages,
        microbatch_group_size=choice.group,
    )


def family_of(name: str) -> Family:
    """The family of this name; ScheduleError where none that can be planned is called so."""
    for family in RUNNABLE:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in RUNNABLE)
    raise ScheduleError(f"--schedule {name}: plans are made with {known}")


def groups(family: Family, *, ranks: int, microbatches: int) -> tuple[int | None, ...]:
    """Sizes of groups worth trying: what a schedule takes by default, and one smaller or larger."""
    if not family.takes_group:
        return (None,)
    tried = (-(-ranks // 2), ranks) if family.name == "gis" else (ranks, 2 * ranks)
    return tuple(dict.fromkeys(g for g in tried if g == ranks or g <= microbatches))
