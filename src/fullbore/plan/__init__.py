"""Model and cluster in, configuration out: what it will cost, and why not another one."""

from fullbore.plan.choice import Choice, Spread
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.found import Effort
from fullbore.plan.planner import Plan, Progress, plan
from fullbore.plan.question import Allowance, Fixed, Question

__all__ = [
    "Allowance",
    "Choice",
    "Effort",
    "Evaluated",
    "Evaluator",
    "Fixed",
    "Plan",
    "Progress",
    "Question",
    "Spread",
    "plan",
]
