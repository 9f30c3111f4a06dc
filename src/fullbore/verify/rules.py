"""The table of laws, and the judgement of a schedule by all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fullbore.errors import ScheduleError, VerificationError
from fullbore.ir import Schedule
from fullbore.verify.case import Case, case_of
from fullbore.verify.deadlock import finishes
from fullbore.verify.laws import complete, known, live_activations, ordered, placed
from fullbore.verify.messages import first_in_first_out, sent_and_received
from fullbore.verify.violation import Finding, Violation, report

__all__ = ["MOST_PER_RULE", "RULES", "Rule", "check", "verify"]

MOST_PER_RULE = 1000
"""A law stops after this many violations; nobody reads more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A law by name. Where `presumes` names laws that are broken, it is not judged."""

    name: str
    law: Callable[[Case], Iterator[Finding]]
    presumes: tuple[str, ...] = ()

    @property
    def statement(self) -> str:
        """The law in one sentence."""
        return (self.law.__doc__ or "").split("\n\n")[0].strip()


_SHAPE = ("known",)
_STRUCTURE = (*_SHAPE, "placed", "complete", "ordered", "sent-and-received", "first-in-first-out")

RULES: tuple[Rule, ...] = (
    Rule(name="known", law=known),
    Rule(name="placed", law=placed, presumes=_SHAPE),
    Rule(name="complete", law=complete, presumes=_SHAPE),
    Rule(name="ordered", law=ordered, presumes=_SHAPE),
    Rule(name="sent-and-received", law=sent_and_received, presumes=_SHAPE),
    Rule(name="first-in-first-out", law=first_in_first_out, presumes=_SHAPE),
    Rule(name="finishes", law=finishes, presumes=_STRUCTURE),
    Rule(name="live-activations", law=live_activations),
)


def verify(
    schedule: Schedule,
    *,
    peak_limit: float | Sequence[float] | None = None,
    blocking_sends: bool = False,
) -> list[Violation]:
    """All laws that a schedule breaks: an empty list for a lawful one.

    peak_limit: the most live activations, in microbatches x 1/P of the model, for every rank or
    for each [P]. blocking_sends: a rank waits for its own sends, as with the runtime's
    overlap_p2p=False. Works on compute-only schedules and on those with communication. At most
    MOST_PER_RULE violations of each law, in the order of RULES. Linear in actions, but for
    sorting.
    """
    limits = _limits(schedule, peak_limit)
    case = case_of(schedule, peak_limits=limits, blocking_sends=blocking_sends)
    found: list[Violation] = []
    broken: set[str] = set()
    for rule in RULES:
        if broken.isdisjoint(rule.presumes):
            findings = list(islice(rule.law(case), MOST_PER_RULE))
            found += [_violation(rule, finding) for finding in findings]
            broken |= {rule.name} if findings else set()
    return found


def check(
    schedule: Schedule,
    *,
    peak_limit: float | Sequence[float] | None = None,
    blocking_sends: bool = False,
) -> None:
    """Raise VerificationError, naming what is wrong, unless the schedule is lawful.

    Arguments as for `verify`.
    """
    violations = verify(schedule, peak_limit=peak_limit, blocking_sends=blocking_sends)
    if violations:
        raise VerificationError(report(violations))


def _violation(rule: Rule, finding: Finding) -> Violation:
    return Violation(
        rank=finding.rank,
        index=finding.index,
        action=finding.action,
        rule=rule.name,
        remedy=finding.remedy,
        detail=finding.detail,
    )


def _limits(
    schedule: Schedule, peak_limit: float | Sequence[float] | None
) -> tuple[float, ...] | None:
    if peak_limit is None:
        return None
    if isinstance(peak_limit, (int, float)):
        limits: tuple[float, ...] = (peak_limit,) * schedule.ranks
    else:
        limits = tuple(peak_limit)
    if any(math.isnan(limit) for limit in limits):
        raise ScheduleError("peak_limit is not a number: nothing is over such a limit")
    if len(limits) != schedule.ranks:
        raise ScheduleError(
            f"peak_limit has {len(limits)} values: give one, or one for each of the "
            f"{schedule.ranks} ranks"
        )
    return limits
