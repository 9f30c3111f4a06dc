"""What no flag of Megatron-LM gives: the same job under schedules that it does not have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.engines import engine_of
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.explain.advice import NOTABLE, Desk
from fullbore.plan.explain.job import Job
from fullbore.plan.neighbours import of_family, why
from fullbore.plan.parts import parts_of
from fullbore.plan.programs import RUNNABLE

__all__ = ["Beyond", "beyond_of"]

_MOST = 20_000  # microbatches of stages: of larger jobs some schedules take long to build


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """A schedule, the share of the job's step that it saves, and where that comes from."""

    evaluated: Evaluated
    gain: float
    reason: str


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
    return Beyond(evaluated=best, gain=gain, reason=why(-gain, base, other, now.step_s))


def _evaluated(evaluator: Evaluator, now: Evaluated) -> list[Evaluated]:
    made = []
    for family in RUNNABLE:
        if family.name not in engine_of("megatron").schedules:
            try:
                made.append(evaluator.evaluate(of_family(now.choice, family)))
            except (ConfigError, ScheduleError):
                continue  # no such schedule of these numbers
    return made
