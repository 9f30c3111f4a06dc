"""What no flag of Megatron-LM gives: the same job under schedules that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.choice import Choice
from fullbore.plan.engines import ENGINES, check, engine_of
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.explain.advice import NOTABLE, Desk
from fullbore.plan.explain.job import Job
from fullbore.plan.neighbours import of_family, why
from fullbore.plan.parts import parts_of
from fullbore.plan.programs import RUNNABLE
from fullbore.plan.question import Question

__all__ = ["Beyond", "beyond_of"]

_MOST = 20_000  # microbatches of stages: of larger jobs some schedules take long to build


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """A schedule, the share of the job's step that it saves, and where that comes from.

    engines: titles of those that can carry it out with the job's sizes and precision.
    """

    evaluated: Evaluated
    gain: float
    reason: str
    engines: tuple[str, ...]


def beyond_of(desk: Desk, job: Job, now: Evaluated) -> Beyond | None:
    """The fastest of them that fits, messages overlapped; None where none is faster."""
    choice = now.choice
    if choice.spread.pipeline == 1 or choice.stages * choice.spread.microbatches > _MOST:
        return None
    known = desk.of(job)
    evaluator = desk.evaluator(replace(known.question, overlap_messages=True))
    found = [one for one in _evaluated(evaluator, now) if one.fits]
    best = min(found, key=lambda one: one.order, default=None)
    if best is None or best.step_s >= now.step_s * (1 - NOTABLE):
        return None
    gain = 1 - best.step_s / now.step_s
    base, other = parts_of(known, choice), parts_of(evaluator, best.choice)
    return Beyond(
        evaluated=best,
        gain=gain,
        reason=why(-gain, base, other, now.step_s),
        engines=tuple(_able(known.question, best.choice)),
    )


def _able(question: Question, choice: Choice) -> Iterator[str]:
    for engine in ENGINES:
        try:
            check(engine, question, choice)
        except ConfigError:
            continue
        yield engine.title


def _evaluated(evaluator: Evaluator, now: Evaluated) -> list[Evaluated]:
    made = []
    for family in RUNNABLE:
        if family.name not in engine_of("megatron").schedules:
            try:
                made.append(evaluator.evaluate(of_family(now.choice, family)))
            except (ConfigError, ScheduleError):
                continue  # no such schedule of these numbers
    return made
