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
    if schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.name} cuts sequences into {schedule.slices} slices, and the runtime does "
            "not carry keys and values from slice to slice: simulate it, or run eager-1f1b or "
            "interleaved with more microbatches"
        )
