"""The numbers that a generator is given, checked before anything is allocated for them.

Each refusal names the nearest legal values, so that a typing error costs one line and no launch.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import MOST_ACTIONS, MOST_RANKS

__all__ = ["check_numbers"]


def check_numbers(*, ranks: int, microbatches: int, virtual_stages: int = 1) -> None:
    """Refuse P, v or M below 1, P above MOST_RANKS, and more than MOST_ACTIONS actions.

    Raises ScheduleError, which names the nearest legal value.
    """
    for name, letter, value in (
        ("ranks", "P", ranks),
        ("microbatches", "M", microbatches),
        ("virtual_stages", "v", virtual_stages),
    ):
        if value < 1:
            raise ScheduleError(f"{name} ({letter}) is {value}: the nearest legal value is 1")
    if ranks > MOST_RANKS:
        raise ScheduleError(f"ranks (P) is {ranks}: the nearest legal value is {MOST_RANKS}")
    actions = 2 * ranks * virtual_stages * microbatches
    if actions > MOST_ACTIONS:
        most = MOST_ACTIONS // (2 * ranks * virtual_stages)
        advice = f"the nearest legal M is {most}" if most else "take fewer virtual stages (v)"
        raise ScheduleError(
            f"P={ranks}, v={virtual_stages}, M={microbatches} make {actions:,} actions, more than "
            f"the {MOST_ACTIONS:,} that are supported: {advice}"
        )
