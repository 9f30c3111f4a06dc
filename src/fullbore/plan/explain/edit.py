"""A change of flags, such as someone would type it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fullbore.cost.model.script import Flags
from fullbore.plan.explain.catalog import flag

__all__ = ["Edit", "setting", "without"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Flags by their names with underscores: the words behind each, or None to leave it out."""

    changes: tuple[tuple[str, tuple[str, ...] | None], ...]

    def applied(self, flags: Mapping[str, tuple[str, ...]]) -> Flags:
        """The flags with the change made."""
        made = dict(flags)
        for name, words in self.changes:
            if words is None:
                made.pop(name, None)
            else:
                made[name] = words
        return made

    def __add__(self, other: Edit) -> Edit:
        """Both changes; of a flag that both name the later one holds."""
        merged = dict(self.changes) | dict(other.changes)
        return Edit(changes=tuple(merged.items()))

    @property
    def text(self) -> str:
        """`--micro-batch-size 2, no --recompute-granularity`."""
        return ", ".join(
            f"no {flag(name)}" if words is None else " ".join([flag(name), *map(_quoted, words)])
            for name, words in self.changes
        )


def setting(name: str, *words: str | int) -> Edit:
    """A flag with its words: none for a switch."""
    return Edit(changes=((name, tuple(map(str, words))),))


def without(*names: str) -> Edit:
    """Flags left out."""
    return Edit(changes=tuple((name, None) for name in names))


def _quoted(word: str) -> str:
    return f"'{word}'" if any(sign in word for sign in "|()*[] ") else word
