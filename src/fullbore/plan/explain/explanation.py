"""All there is to say of a job's flags: violations, figures, the change that helps most, notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fullbore.cost.hardware import Cluster
from fullbore.plan.counts import Counts
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.explain.advice import Advice, Desk, advised
from fullbore.plan.explain.beyond import Beyond, beyond_of
from fullbore.plan.explain.edit import Edit
from fullbore.plan.explain.job import Job
from fullbore.plan.explain.nearest import Violation, judged, mended
from fullbore.plan.explain.notes import Notes, notes_of
from fullbore.plan.figures import figures
from fullbore.plan.findings import Findings
from fullbore.plan.parts import idle_of, parts_of
from fullbore.plan.planner import Plan

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """violations: what Megatron-LM refuses. unpriced: what it runs, and has no price here. mend:
    the changes with which figures are given where there is either, empty where there is neither,
    None where none was found. findings, advice: None then too. job: with the changes made. beyond:
    the best schedule that Megatron-LM does not have, where it is faster.
    """

    job: Job
    violations: tuple[Violation, ...]
    unpriced: tuple[Violation, ...]
    mend: Edit | None
    findings: Findings | None
    advice: Advice | None
    beyond: Beyond | None
    notes: Notes

    @property
    def runs(self) -> bool:
        """Whether the flags are legal and priced as they are, and the job fits its memory."""
        if self.violations or self.unpriced or self.findings is None:
            return False
        return self.findings.winner.fits


def explain(
    flags: Mapping[str, tuple[str, ...]],
    cluster: Cluster,
    *,
    name: str = "megatron",
    memory_limit_bytes: float | None = None,
    top: int = 5,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Explanation:
    """Explain Megatron's flags (names with underscores) on a cluster.

    name: what the model is called. top: how many changes to tell of. report: called with how many
    changes are evaluated, and of how many. Raises ConfigError where the flags are legal and cannot
    be priced, or the memory limit is more than there is.
    """
    asked = Job(flags=dict(flags), cluster=cluster, name=name)
    judgement, notes = judged(asked), notes_of(asked)
    found = tuple(one for one in judgement if not one.broken.is_ours)
    unpriced = tuple(one for one in judgement if one.broken.is_ours)
    mend = mended(asked)
    if mend is None:
        return Explanation(
            job=asked,
            violations=found,
            unpriced=unpriced,
            mend=None,
            findings=None,
            advice=None,
            beyond=None,
            notes=notes,
        )
    job = asked.changed(mend)
    desk = Desk(memory_limit_bytes)
    now = desk.evaluate(job)
    findings = _findings(desk.of(job), now)
    advice = advised(desk, job, now, top=top, report=report)
    return Explanation(
        job=job,
        violations=found,
        unpriced=unpriced,
        mend=mend,
        findings=findings,
        advice=advice,
        beyond=beyond_of(desk, job, now),
        notes=notes,
    )


def _findings(evaluator: Evaluator, now: Evaluated) -> Findings:
    """The planner's findings of a plan of one."""
    made = Plan(
        question=evaluator.question,
        best=(now,),
        known={},
        front=(now,),
        counts=Counts(spreads=1, simulated=1, simulations=evaluator.simulated),
        complete=True,
        evaluator=evaluator,
    )
    return Findings(
        plan=made,
        figures=(figures(evaluator.question, now.choice, step_s=now.step_s),),
        memory=evaluator.memory(now.choice),
        idle=idle_of(evaluator, now.choice),
        parts=parts_of(evaluator, now.choice),
        neighbours=(),
    )
