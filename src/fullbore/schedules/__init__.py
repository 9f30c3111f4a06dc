"""Schedules by name: one pure generator a file, and the table of them."""

from fullbore.schedules.dualpipe import dualpipe
from fullbore.schedules.dualpipe_v import dualpipe_v
from fullbore.schedules.eager_1f1b import eager_1f1b
from fullbore.schedules.families import FAMILIES, Family, build
from fullbore.schedules.gis import gis
from fullbore.schedules.gis_h import gis_h
from fullbore.schedules.gpipe import gpipe
from fullbore.schedules.hanayo import hanayo
from fullbore.schedules.interleaved import interleaved
from fullbore.schedules.looped_bfs import looped_bfs
from fullbore.schedules.one_f_one_b import one_f_one_b
from fullbore.schedules.seq1f1b import seq1f1b
from fullbore.schedules.v_half import v_half
from fullbore.schedules.v_min import v_min
from fullbore.schedules.zb_h1 import zb_h1
from fullbore.schedules.zb_h2 import zb_h2
from fullbore.schedules.zb_v import zb_v

__all__ = [
    "FAMILIES",
    "Family",
    "build",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "gis",
    "gis_h",
    "gpipe",
    "hanayo",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "seq1f1b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
