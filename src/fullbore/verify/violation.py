"""A violation: which rank, which action, which law, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbore.ir import Action

__all__ = ["Finding", "Violation", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a law found: a violation that does not yet say whose law it is."""

    rank: int
    index: int | None
    action: Action
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken law.

    rank: whose program. index: 0-based position in it, None where the action is missing.
    rule: name of the law, see `RULES`. detail: what is wrong. remedy: what to do.
    """

    rank: int
    index: int | None
    action: Action
    rule: str
    remedy: str
    detail: str

    def __str__(self) -> str:
        where = "" if self.index is None else f", index {self.index}"
        return f"rank {self.rank}{where}, {self.action}: {self.rule}: {self.detail}; {self.remedy}"


def report(violations: Sequence[Violation], *, most: int = 20) -> str:
    """Violations as text, one a line: the first `most`, and how many more there are."""
    lines = [str(violation) for violation in violations[:most]]
    if len(violations) > most:
        lines.append(f"... and {len(violations) - most} more")
    return "\n".join(lines)
