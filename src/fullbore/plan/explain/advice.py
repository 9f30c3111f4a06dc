"""The one change that helps most: every single change of flags, evaluated as the planner does it.

Where the job does not fit its memory, changes that make it fit are compared; where no single one
does, pairs of those that need less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.explain.asked import choice_of, question_of
from fullbore.plan.explain.edit import Edit
from fullbore.plan.explain.job import Job
from fullbore.plan.explain.moves import by_cost, moves
from fullbore.plan.explain.rules import violations
from fullbore.plan.neighbours import why
from fullbore.plan.parts import parts_of
from fullbore.plan.question import Question

__all__ = ["NOTABLE", "Advice", "Change", "Desk", "advised"]

NOTABLE = 0.001  # of the step: a smaller gain is not worth a change
_MOST_PAIRS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Flags changed, and what would come of it.

    gain: the share of the job's step that it saves, below 0 where it takes longer. reason: of the
    best ones, where the gain comes from.
    """

    edit: Edit
    evaluated: Evaluated
    gain: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """changes: those that fit, fastest first; pairs where no single one fits. best: the first, if
    it is worth it. tried: how many were evaluated. too_large: those that do not fit, the smallest
    first.
    """

    changes: tuple[Change, ...]
    best: Change | None
    tried: int
    too_large: tuple[Change, ...]


class Desk:
    """Jobs evaluated one after another: what they share is worked out once."""

    def __init__(self, memory_limit_bytes: float | None) -> None:
        self.memory_limit_bytes = memory_limit_bytes
        self._evaluators: list[Evaluator] = []

    def evaluator(self, question: Question) -> Evaluator:
        """The evaluator of a question; its schedules are those of all others."""
        for known in self._evaluators:
            if known.question == question:
                return known
        made = Evaluator(question)
        if self._evaluators:
            made.programs = self._evaluators[0].programs
        self._evaluators.append(made)
        return made

    def of(self, job: Job) -> Evaluator:
        """The evaluator of a legal job."""
        return self.evaluator(question_of(job, memory_limit_bytes=self.memory_limit_bytes))

    def evaluate(self, job: Job) -> Evaluated:
        """What a legal job comes to; ConfigError or ScheduleError where it cannot be priced."""
        return self.of(job).evaluate(choice_of(job))


def advised(
    desk: Desk,
    job: Job,
    now: Evaluated,
    *,
    top: int,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Advice:
    """Evaluate every change of a legal job that comes to `now`.

    report: called with how many changes are done, and of how many.
    """
    singles = _singles(desk, job)
    made = _evaluated(desk, job, now, singles, report)
    if not now.fits and not any(one.evaluated.fits for one in made):
        made += _evaluated(desk, job, now, _pairs(made, now), report)
    fitting = sorted((one for one in made if one.evaluated.fits), key=_by_time)[:top]
    large = sorted((one for one in made if not one.evaluated.fits), key=_by_memory)
    changes = tuple(_reasoned(desk, job, now, one) for one in fitting)
    is_worth = bool(changes) and (not now.fits or changes[0].gain > NOTABLE)
    return Advice(
        changes=changes,
        best=changes[0] if is_worth else None,
        tried=len(made),
        too_large=tuple(large),
    )


def _by_time(one: Change) -> tuple[float, float]:
    return one.evaluated.order


def _by_memory(one: Change) -> float:
    return one.evaluated.peak_bytes


def _singles(desk: Desk, job: Job) -> list[Edit]:
    """All single changes that are legal."""
    edits = (*moves(job), *_balanced(desk, job))
    return list({edit.text: edit for edit in edits if _is_legal(job, edit)}.values())


def _balanced(desk: Desk, job: Job) -> Iterator[Edit]:
    """Layers cut by cost, where there are as many as stages."""
    if job.pipeline == 1:
        return
    try:
        layers = desk.of(job).with_layers(replace(choice_of(job), layers=None)).layers
    except ConfigError:
        return
    edit = by_cost(job, layers or ())
    if edit is not None:
        yield edit


def _is_legal(job: Job, edit: Edit) -> bool:
    return not violations(job.changed(edit))


def _pairs(made: Sequence[Change], now: Evaluated) -> list[Edit]:
    """Two changes that both need less memory, the most promising first."""
    less = [one for one in made if one.evaluated.peak_bytes < now.peak_bytes]
    pairs = sorted(
        combinations(less, 2),
        key=lambda pair: pair[0].evaluated.peak_bytes * pair[1].evaluated.peak_bytes,
    )
    return [
        one.edit + other.edit
        for one, other in pairs[:_MOST_PAIRS]
        if not set(dict(one.edit.changes)) & set(dict(other.edit.changes))
    ]


def _evaluated(
    desk: Desk,
    job: Job,
    now: Evaluated,
    edits: Sequence[Edit],
    report: Callable[[int, int], None],
) -> list[Change]:
    made: list[Change] = []
    for done, edit in enumerate(edits):
        report(done, len(edits))
        made += _one(desk, job, now, edit)
    report(len(edits), len(edits))
    return made


def _one(desk: Desk, job: Job, now: Evaluated, edit: Edit) -> Iterator[Change]:
    """What a change comes to; nothing where it is not legal or cannot be priced."""
    if not _is_legal(job, edit):
        return
    try:
        one = desk.evaluate(job.changed(edit))
    except (ConfigError, ScheduleError):
        return
    yield Change(edit=edit, evaluated=one, gain=1 - one.step_s / now.step_s)


def _reasoned(desk: Desk, job: Job, now: Evaluated, one: Change) -> Change:
    changed = job.changed(one.edit)
    base = parts_of(desk.of(job), now.choice)
    other = parts_of(desk.of(changed), one.evaluated.choice)
    return replace(one, reason=why(-one.gain, base, other, now.step_s))
