"""The numbers that a generator is given, checked before anything is allocated for them.

Each refusal names the nearest legal values, so that a typing error costs one line and no launch.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError

__all__ = ["MOST_ACTIONS", "check_numbers"]

# A schedule this large takes about 2 GB as arrays; P=1024, v=32, M=1024 has 67 million.
MOST_ACTIONS = 100_000_000


def check_numbers(*, ranks: int, microbatches: int, virtual_stages: int = 1) -> None:
    """Refuse P, v or M below 1, and schedules of more than MOST_ACTIONS actions (ScheduleError)."""
    for name, letter, value in (
        ("ranks", "P", ranks),
        ("microbatches", "M", microbatches),
        ("virtual_stages", "v", virtual_stages),
    ):
        if value < 1:
            raise ScheduleError(f"{name} ({letter}) is {value}: the nearest legal value is 1")
    actions = 2 * ranks * virtual_stages * microbatches
    if actions > MOST_ACTIONS:
        most = MOST_ACTIONS // (2 * ranks * virtual_stages)
        advice = f"the nearest legal value is {most}" if most else "use fewer ranks"
        raise ScheduleError(
            f"P={ranks}, v={virtual_stages}, M={microbatches} make {actions:,} actions and "
            f"{MOST_ACTIONS:,} are supported: of microbatches, {advice}"
        )
