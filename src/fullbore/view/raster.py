"""Bars of one rank on a grid of columns, for pictures that cannot be zoomed.

Spans narrower than a column are merged: the column then has the mean of their colours, as faint
as the column is empty. That keeps a picture of a million actions small, and honest about how full
the rank was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind
from fullbore.timeline import Timeline
from fullbore.view.palette import rgb, shade
from fullbore.view.panel import chunk_of_span

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

__all__ = ["Bar", "Rows", "rows"]

_KINDS = len(Kind)
_STRENGTHS = 4  # in how many steps the filling of a merged column is drawn
_COARSE = 16  # step of a merged column's red, green and blue, so that neighbours can be one bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """From left to right (in columns, fractions allowed), in `color` ("#rrggbb").

    span: index in the timeline, or -1 where several spans were merged; kind and chunk are then
    those that fill most of the bar. strength: which part of the bar is really filled, above 0
    and at most 1 (1 for a single span).
    """

    left: float
    right: float
    color: str
    kind: Kind
    chunk: int
    span: int
    strength: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The bars of each rank, sorted by `left`, and how many chunks a rank has at most."""

    bars: tuple[tuple[Bar, ...], ...]
    chunks: int


def rows(
    timeline: Timeline,
    *,
    columns: int,
    columns_per_s: float,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> Rows:
    """Spans of every rank as bars on `columns` columns, 0 s at column 0.

    chosen: which [n], of which those of one rank must not overlap; compute if not given.
    """
    chunk = chunk_of_span(timeline)
    chunks = int(chunk.max(initial=0)) + 1
    look = timeline.kind.astype(np.int64) + _KINDS * chunk
    palette = tuple(
        shade(Kind(kind), chunk=part, chunks=chunks)
        for part in range(chunks)
        for kind in range(_KINDS)
    )
    drawn = np.flatnonzero(timeline.is_compute if chosen is None else chosen)
    bounds = np.searchsorted(timeline.rank[drawn], np.arange(timeline.ranks + 1))
    bars = []
    for first, last in pairwise(bounds.tolist()):
        spans = drawn[first:last]
        left = timeline.start_s[spans] * columns_per_s
        right = timeline.end_s[spans] * columns_per_s
        wide = right - left >= 1.0 - 1e-9
        row = _single(left[wide], right[wide], look[spans[wide]], spans[wide], palette)
        if not wide.all():
            row += _merged(left[~wide], right[~wide], look[spans[~wide]], columns, palette)
        bars.append(tuple(sorted(row, key=lambda bar: bar.left)))
    return Rows(bars=tuple(bars), chunks=chunks)


def _single(
    left: Floats, right: Floats, look: Integers, spans: Integers, palette: tuple[str, ...]
) -> list[Bar]:
    return [
        Bar(
            left=begin,
            right=end,
            color=palette[seen],
            kind=Kind(seen % _KINDS),
            chunk=seen // _KINDS,
            span=span,
            strength=1.0,
        )
        for begin, end, seen, span in zip(
            left.tolist(), right.tolist(), look.tolist(), spans.tolist(), strict=True
        )
    ]


def _merged(
    left: Floats, right: Floats, look: Integers, columns: int, palette: tuple[str, ...]
) -> list[Bar]:
    """Narrow spans as bars of whole columns; equal neighbours become one bar."""
    column = np.clip(((left + right) / 2).astype(np.int64), 0, columns - 1)
    filled = np.bincount(
        column * len(palette) + look, weights=right - left, minlength=columns * len(palette)
    ).reshape(columns, len(palette))
    total = filled.sum(axis=1)
    level = np.round(np.minimum(total, 1.0) * _STRENGTHS)
    level = np.where(total > 0, np.maximum(level, 1), 0).astype(np.int64)
    mean = filled @ np.array([rgb(color) for color in palette]) / np.maximum(total, 1e-12)[:, None]
    coarse = np.minimum(np.round(mean / _COARSE) * _COARSE, 255).astype(np.int64)
    most = filled.argmax(axis=1)
    key = np.column_stack([level, coarse, most])
    edges = np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1
    return [
        Bar(
            left=float(begin),
            right=float(end),
            color="#" + bytes(coarse[begin].tolist()).hex(),
            kind=Kind(int(most[begin]) % _KINDS),
            chunk=int(most[begin]) // _KINDS,
            span=-1,
            strength=float(level[begin]) / _STRENGTHS,
        )
        for begin, end in pairwise([0, *edges.tolist(), columns])
        if level[begin] > 0
    ]
