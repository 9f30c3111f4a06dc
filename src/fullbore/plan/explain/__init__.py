"""Someone's Megatron flags as they are: what they will get, what is wrong, what would help most."""

from fullbore.plan.explain.advice import Advice, Change
from fullbore.plan.explain.beyond import Beyond
from fullbore.plan.explain.edit import Edit
from fullbore.plan.explain.explanation import Explanation, explain
from fullbore.plan.explain.job import Job
from fullbore.plan.explain.nearest import Violation
from fullbore.plan.explain.notes import Notes

__all__ = [
    "Advice",
    "Beyond",
    "Change",
    "Edit",
    "Explanation",
    "Job",
    "Notes",
    "Violation",
    "explain",
]
