"""Schedules by name: one pure generator a file, and the table of them."""

from fullbore.schedules.families import FAMILIES, Family, build
from fullbore.schedules.gpipe import gpipe
from fullbore.schedules.interleaved import interleaved
from fullbore.schedules.looped_bfs import looped_bfs
from fullbore.schedules.one_f_one_b import one_f_one_b

__all__ = [
    "FAMILIES",
    "Family",
    "build",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
]
