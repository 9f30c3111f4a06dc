"""Plans that no other one beats in both memory and time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from fullbore.plan.evaluate import Evaluated

__all__ = ["Front"]


class Front:
    """What was added and is not beaten, by ascending memory and so by descending time."""

    def __init__(self, members: Sequence[Evaluated] = ()) -> None:
        self._bytes: list[float] = []
        self._members: list[Evaluated] = []
        for member in members:
            self.add(member)

    @property
    def members(self) -> tuple[Evaluated, ...]:
        """The front, the smallest first."""
        return tuple(self._members)

    def is_beaten(self, *, peak_bytes: float, step_s: float) -> bool:
        """Whether a member is no larger and no slower."""
        at = bisect_right(self._bytes, peak_bytes) - 1
        return at >= 0 and self._members[at].step_s <= step_s

    def add(self, one: Evaluated) -> None:
        """Add a plan, and drop those that it beats."""
        if self.is_beaten(peak_bytes=one.peak_bytes, step_s=one.step_s):
            return
        at = end = bisect_left(self._bytes, one.peak_bytes)
        while end < len(self._members) and self._members[end].step_s >= one.step_s:
            end += 1
        self._bytes[at:end] = [one.peak_bytes]
        self._members[at:end] = [one]
