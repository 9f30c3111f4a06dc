"""Schedules searched for the best plans, where no named one may be as fast as theirs could be.

A search knows one memory limit for all ranks: here that of the rank with the least room beside its
weights and states, so that whatever is found fits everywhere. It keeps the stages of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.choice import Choice
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.prices import Row
from fullbore.search import Job, Limits, MemoryLimit, search

__all__ = ["Effort", "searched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long schedules are searched for, for all plans together: seconds, or moves, or neither.

    Where moves are what ends it, the same question has the same answer everywhere.
    """

    seconds: float = 0.0
    moves: int | None = None

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ConfigError(f"--search-time {self.seconds:g}: give seconds, 0 or more")
        if self.moves is not None and self.moves < 1:
            raise ConfigError(f"--search-iterations {self.moves}: it must be 1 or more")

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return self.seconds > 0 or self.moves is not None

    def shared(self, number: int, stop: Callable[[], bool]) -> Limits:
        """The part of one of so many plans."""
        return Limits(
            time_s=self.seconds / number if self.seconds > 0 else None,
            moves=None if self.moves is None else max(1, self.moves // number),
            stop=stop,
        )


def searched(
    evaluator: Evaluator, one: Evaluated, limits: Limits, *, name: str
) -> Evaluated | None:
    """A plan with a schedule found for its stages, called by this name; None where none fits.

    It may be a named schedule again, and no faster.
    """
    choice = one.choice
    if choice.spread.pipeline == 1:
        return None
    room = _room(evaluator, choice)
    if room <= 0:
        return None
    job = Job(
        costs=evaluator.costs(choice),
        ranks=choice.spread.pipeline,
        microbatches=choice.spread.microbatches,
        virtual_stages=(choice.virtual_stages,),
        memory_limit=MemoryLimit(amounts=(room,), unit="bytes"),
        spans=False,
    )
    try:
        found = search(job, limits=limits)
    except (ConfigError, ScheduleError):
        return None  # not even one microbatch fits beside another rank's states
    evaluator.programs.add(name, found.schedule, base=choice)
    made = evaluator.evaluate(replace(choice, schedule=name, group=None))
    return made if made.fits else None


def _room(evaluator: Evaluator, choice: Choice) -> float:
    """Bytes of activations that every rank can hold."""
    load, allowance = evaluator.load(choice), evaluator.question.allowance
    stays = load.parameters + load.gradients + load.optimizer + allowance.context_bytes
    free = (evaluator.question.limit_bytes - stays) / (1 + allowance.fragmented) - load.buffers
    scratch = np.zeros(load.ranks)
    np.maximum.at(scratch, load.home, load.sums[Row.SCRATCH])
    return float((free - scratch).min())
