"""What the runtime has no way to carry out, though it is lawful and can be simulated."""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import Schedule

__all__ = ["check_runnable"]


def check_runnable(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the schedule, unless the runtime can carry it out."""
    if schedule.placement.copies:
        raise ScheduleError(
            f"{schedule.name} holds {len(schedule.placement.tables)} copies of the model, and the "
            "runtime one: simulate it, or run dualpipe-v, which holds each stage once"
        )
