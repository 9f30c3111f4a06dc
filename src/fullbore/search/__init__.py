"""Schedules found, not written: costs and a memory limit in, schedule and lower bound out."""

from fullbore.search.budget import Limits, Progress
from fullbore.search.candidates import Job
from fullbore.search.memory import MemoryLimit
from fullbore.search.relief import MEANS, Means
from fullbore.search.robust import Jitter
from fullbore.search.search import Found, search

__all__ = [
    "MEANS",
    "Found",
    "Jitter",
    "Job",
    "Limits",
    "Means",
    "MemoryLimit",
    "Progress",
    "search",
]
