"""All that a plan has to say: rates of each plan, the winner rank by rank, its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.plan.evaluate import Evaluated
from fullbore.plan.figures import Figures, figures
from fullbore.plan.memory import Memory
from fullbore.plan.neighbours import Neighbour, neighbours
from fullbore.plan.parts import Idle, Parts, idle_of, parts_of
from fullbore.plan.planner import Plan

__all__ = ["Findings", "findings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A plan, the figures of its best in the same order, and the winner in detail."""

    plan: Plan
    figures: tuple[Figures, ...]
    memory: Memory
    idle: Idle
    parts: Parts
    neighbours: tuple[Neighbour, ...]

    @property
    def winner(self) -> Evaluated:
        """The fastest plan."""
        return self.plan.winner


def findings_of(plan: Plan) -> Findings:
    """Work out what there is to say; a few dozen simulations."""
    evaluator, winner = plan.evaluator, plan.winner
    return Findings(
        plan=plan,
        figures=tuple(figures(plan.question, one.choice, step_s=one.step_s) for one in plan.best),
        memory=evaluator.memory(winner.choice),
        idle=idle_of(evaluator, winner.choice),
        parts=parts_of(evaluator, winner.choice),
        neighbours=neighbours(evaluator, winner, known=plan.known),
    )
