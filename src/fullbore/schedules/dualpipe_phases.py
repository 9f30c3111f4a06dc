"""The phases of DualPipe, which its fold into a V shares: there only the ranks are counted twice.

Two directions meet in the middle of the pipeline, or at the tip of the V. A rank's stage 0 is the
one that a microbatch reaches before they meet, its stage 1 the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.schedules.phases import Phase

__all__ = ["dualpipe_phases"]


def dualpipe_phases(*, outside: int, inside: int, each: int) -> Iterator[Phase]:
    """Phases of a rank with `outside` ranks before it and `inside` ranks behind it on the way to
    where the two directions meet; `each` microbatches for each of its stages, at least twice as
    many as all those ranks together with its own.
    """
    met = outside + 1
    yield Phase("F0", 2 * inside)
    yield Phase("F0 F1", met)
    yield Phase("I1 W F1", inside)
    yield Phase("F0 B1 F1 B0", each - 2 * (outside + inside + 1) + met)
    yield Phase("B1 F1 B0", inside)
    yield Phase("B1 B0", met // 2)
    yield Phase("B1 I0", met % 2)
    yield Phase("I1 I0", met // 2)
    yield Phase("W I0", inside)
    yield Phase("W", met)
