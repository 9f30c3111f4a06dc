"""The forward half of a schedule, for evaluation: its forwards in their order, nothing else."""

from __future__ import annotations

from dataclasses import replace

from fullbore.ir import Kind, Schedule
from fullbore.passes.communication import insert_communication

__all__ = ["forward_only"]


def forward_only(schedule: Schedule) -> Schedule:
    """The same forwards in the same order on each rank, with the sends and receives they need."""
    forwards = replace(
        schedule, programs=tuple(p.select(p.kind == Kind.F) for p in schedule.programs)
    )
    return insert_communication(forwards)
