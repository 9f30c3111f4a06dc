"""What a schedule must satisfy, one small function a law, and what its links must carry."""

from fullbore.verify.links import LinkUse, links, window
from fullbore.verify.rules import MOST_PER_RULE, RULES, Rule, check, verify
from fullbore.verify.runnable import check_runnable
from fullbore.verify.violation import Violation, report

__all__ = [
    "MOST_PER_RULE",
    "RULES",
    "LinkUse",
    "Rule",
    "Violation",
    "check",
    "check_runnable",
    "links",
    "report",
    "verify",
    "window",
]
