"""The schedule as a value: actions, placement, per-rank programs, text, dependencies.

Knows no time, no bytes, no colour and no torch; everything else in Fullbore stands on it.
"""

from fullbore.ir.action import COMMUNICATION_KINDS, COMPUTE_KINDS, COPY_KINDS, Action, Kind
from fullbore.ir.deps import Dependencies, dependencies
from fullbore.ir.placement import MOST_ACTIONS, MOST_RANKS, Placement
from fullbore.ir.schedule import FlatSchedule, Program, Schedule
from fullbore.ir.text import from_text, read_text, to_text

__all__ = [
    "COMMUNICATION_KINDS",
    "COMPUTE_KINDS",
    "COPY_KINDS",
    "MOST_ACTIONS",
    "MOST_RANKS",
    "Action",
    "Dependencies",
    "FlatSchedule",
    "Kind",
    "Placement",
    "Program",
    "Schedule",
    "dependencies",
    "from_text",
    "read_text",
    "to_text",
]
