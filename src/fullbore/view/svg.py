"""A still picture of panels as SVG, for papers, READMEs and chat windows.

Plain shapes and one style sheet: colours follow the reader's light or dark scheme where the
viewer knows schemes, and are those for light ground elsewhere. Copies to the host and back have a
thin lane beneath their rank. Sends and receives are left out; the HTML report has them. Actions
too short for the picture are merged, see `raster`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from fullbore.ir import Kind
from fullbore.timeline import Curve
from fullbore.view.palette import CURVE, IDLE_DARK, IDLE_LIGHT, LABELS, ink, shades_of
from fullbore.view.panel import Panel, extent_s
from fullbore.view.raster import Bar, Rows, rows
from fullbore.view.units import TimeUnit, amount, ticks, time_unit

__all__ = ["render"]

_MARGIN, _GUTTER, _RIGHT = 20, 72, 76
_TITLE, _FACT, _AXIS, _GAP = 30, 18, 30, 26
_LEGEND = 40
_DIGIT = 6.6  # width of a digit of the numbers in bars
_MOST_HINTS = 4000  # with more bars than this they carry no hover text
_MOST_COLUMNS = 200_000  # of all ranks together; beyond it columns are wider than a pixel
_STYLE = f"""
text {{ font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
  font-size: 12px; fill: #3c4654 }}
.ground {{ fill: #ffffff }} .idle {{ fill: {IDLE_LIGHT} }}
.title {{ font-size: 15px; font-weight: 600; fill: #111822 }}
.rank {{ text-anchor: end }} .tick {{ text-anchor: middle; font-size: 11px }}
.number {{ text-anchor: middle; font-size: 11px }}
.rule {{ stroke: #9aa4b1; stroke-width: 1 }} .peak {{ font-size: 11px }}
.curve {{ fill: {CURVE}; fill-opacity: .25; stroke: {CURVE}; stroke-width: 1 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #b9c2ce }} .ground {{ fill: #10151c }} .idle {{ fill: {IDLE_DARK} }}
  .title {{ fill: #f2f5f8 }} .rule {{ stroke: #5c6673 }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The time axis common to all panels, and the heights of a rank's bar, curve and thin lane.

    column_px: the width below which bars are merged.
    """

    plot_px: int
    column_px: int
    extent_s: float
    bar_px: int
    curve_px: int
    lane_px: int
    unit: TimeUnit

    def x(self, time_s: float) -> float:
        return _GUTTER + self.plot_px * time_s / self.extent_s

    def row_px(self, panel: Panel) -> int:
        return self.copies_px(panel) + self.bar_px + (self.curve_px + 2 if panel.curves else 0) + 4

    def copies_px(self, panel: Panel) -> int:
        """The height of the lane for copies, where there are any."""
        return self.lane_px + 1 if panel.timeline.is_copy.any() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """A panel and what all its rows need: bars, scale, where it ends, its highest curve."""

    panel: Panel
    laid: Rows
    copies: Rows
    scale: _Scale
    end_px: float
    peak: float


def render(panels: Sequence[Panel], *, width_px: int = 1200) -> str:
    """The panels one above the other as one SVG document; `width_px` is at least 400."""
    width_px = max(400, width_px)
    most_ranks = max((panel.timeline.ranks for panel in panels), default=1)
    extent = extent_s(tuple(panel for panel in panels if len(panel.timeline)))
    plot_px = width_px - _GUTTER - _RIGHT
    scale = _Scale(
        plot_px=plot_px,
        column_px=max(1, math.ceil(plot_px * most_ranks / _MOST_COLUMNS)),
        extent_s=extent,
        bar_px=22 if most_ranks <= 16 else 14 if most_ranks <= 64 else 8,
        curve_px=18 if most_ranks <= 16 else 10 if most_ranks <= 64 else 6,
        lane_px=6 if most_ranks <= 16 else 4 if most_ranks <= 64 else 2,
        unit=time_unit(extent),
    )
    body: list[str] = []
    y, chunks, kinds = float(_MARGIN), 1, set[int]()
    for panel in panels:
        plot = _plot(panel, scale)
        body += _panel(plot, y)
        y += _height_px(panel, scale)
        chunks = max(chunks, plot.laid.chunks)
        kinds |= set(panel.timeline.kind[panel.timeline.kind < Kind.SEND_F].tolist())
    curves = dict.fromkeys(f"{p.curve_name}, {p.curve_unit}" for p in panels if p.curves)
    body += _legend([Kind(kind) for kind in sorted(kinds)], chunks, list(curves), y)
    return _document(panels, body, width_px=width_px, height_px=y + _LEGEND)


def _document(
    panels: Sequence[Panel], body: Iterable[str], *, width_px: int, height_px: float
) -> str:
    label = escape("; ".join(panel.title for panel in panels), {'"': "&quot;"})
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {_n(height_px)}" '
        f'width="{width_px}" height="{_n(height_px)}" role="img" aria-label="{label}">'
    )
    ground = f'<rect class="ground" width="{width_px}" height="{_n(height_px)}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", ground, *body, "</svg>", ""])


def _height_px(panel: Panel, scale: _Scale) -> int:
    facts = _FACT if panel.facts else 0
    return _TITLE + facts + panel.timeline.ranks * scale.row_px(panel) + _AXIS + _GAP


def _plot(panel: Panel, scale: _Scale) -> _Plot:
    peaks = [float(curve.values.max(initial=0.0)) for curve in panel.curves]
    columns = math.ceil(scale.plot_px / scale.column_px)
    per_s = scale.plot_px / scale.column_px / scale.extent_s
    copies = panel.timeline.is_copy
    return _Plot(
        panel=panel,
        laid=rows(panel.timeline, columns=columns, columns_per_s=per_s),
        copies=rows(panel.timeline, columns=columns, columns_per_s=per_s, chosen=copies),
        scale=scale,
        end_px=scale.x(panel.timeline.makespan_s),
        peak=max(peaks, default=0.0),
    )


def _panel(plot: _Plot, y: float) -> list[str]:
    panel, scale = plot.panel, plot.scale
    lines = [_text(_GUTTER, y + 14, panel.title, "title")]
    if panel.facts:
        lines.append(_text(_GUTTER, y + 33, "  ·  ".join(panel.facts)))
    y += _TITLE + (_FACT if panel.facts else 0)
    hints = sum(map(len, plot.laid.bars)) <= _MOST_HINTS
    for rank, bars in enumerate(plot.laid.bars):
        top = y + rank * scale.row_px(panel)
        lines.append(_text(_GUTTER - 8, top + scale.bar_px / 2 + 4, f"rank {rank}", "rank"))
        idle_px = plot.end_px - _GUTTER
        lines.append(_rect(_GUTTER, top, idle_px, scale.bar_px, 'class="idle"'))
        for bar in bars:
            lines += _bar(panel, bar, scale, top, scale.bar_px, hints=hints)
        for bar in plot.copies.bars[rank]:
            lines += _bar(panel, bar, scale, top + scale.bar_px + 1, scale.lane_px, hints=hints)
        if panel.curves:
            lines += _curve(plot, rank, top + scale.bar_px + 2 + scale.copies_px(panel))
    return lines + _axis(scale, y + panel.timeline.ranks * scale.row_px(panel))


def _bar(
    panel: Panel, bar: Bar, scale: _Scale, top: float, height: int, *, hints: bool
) -> list[str]:
    """A bar, its hover text, and the microbatch's number where it fits."""
    faint = f' fill-opacity="{bar.strength:g}"' if bar.strength < 1 else ""
    whole = (bar.right - bar.left) * scale.column_px
    left = _GUTTER + bar.left * scale.column_px
    width = whole - (0.6 if whole > 3 else 0.0)  # a hair between neighbours
    hint = _hint(panel, bar, scale) if hints and bar.span >= 0 else ""
    lines = [_rect(left, top, width, height, f'fill="{bar.color}"{faint}', hint)]
    number = "" if bar.span < 0 else str(panel.timeline.microbatch[bar.span])
    if number and height >= 14 and width >= _DIGIT * len(number) + 3:
        style = f'class="number" style="fill:{ink(bar.color)};pointer-events:none"'
        x, y = _n(left + width / 2), _n(top + height / 2 + 4)
        lines.append(f'<text x="{x}" y="{y}" {style}>{number}</text>')
    return lines


def _hint(panel: Panel, bar: Bar, scale: _Scale) -> str:
    timeline, unit = panel.timeline, scale.unit
    kind = bar.kind.name
    start = unit.number(float(timeline.start_s[bar.span]), digits=6)
    end = unit.number(float(timeline.end_s[bar.span]), digits=6)
    action = f"{timeline.stage[bar.span]}{kind}{timeline.microbatch[bar.span]}"
    return f"<title>{action}: {start} to {end} {unit.symbol}</title>"


def _curve(plot: _Plot, rank: int, top: float) -> list[str]:
    """A step curve as an area, all ranks of a panel to one height; its peak at the right."""
    curve, scale = plot.panel.curves[rank], plot.scale
    bottom = top + scale.curve_px
    own = amount(float(curve.values.max(initial=0.0)), plot.panel.curve_unit)
    label = _text(_GUTTER + scale.plot_px + 8, bottom - 2, f"peak {own}", "peak")
    if plot.peak <= 0.0:
        return [label]
    points = [f"M{_n(_GUTTER)} {_n(bottom)}"]
    for x, value in _steps(curve, scale):
        points.append(f"H{_n(x)}V{_n(bottom - scale.curve_px * value / plot.peak)}")
    points.append(f"H{_n(plot.end_px)}V{_n(bottom)}Z")
    return [f'<path class="curve" d="{"".join(points)}"/>', label]


def _steps(curve: Curve, scale: _Scale) -> list[tuple[float, float]]:
    """The curve's steps as (pixel, value); of the steps within half a pixel, the highest."""
    half_pixel = np.floor(curve.times_s * (2 * scale.plot_px / scale.extent_s))
    first = np.flatnonzero(np.diff(half_pixel, prepend=-1.0))
    if not len(first):
        return []
    highest = np.maximum.reduceat(curve.values, first)
    x = _GUTTER + scale.plot_px / scale.extent_s * curve.times_s[first]
    return list(zip(x.tolist(), highest.tolist(), strict=True))


def _axis(scale: _Scale, y: float) -> list[str]:
    lines = [_line(_GUTTER, y, _GUTTER + scale.plot_px, y)]
    times = ticks(scale.extent_s, at_most=max(2, scale.plot_px // 90))
    for time_s in times:
        x = scale.x(time_s)
        number = scale.unit.number(time_s, digits=6)
        lines.append(_line(x, y, x, y + 5))
        lines.append(_text(x, y + 19, number, "tick"))
    lines.append(_text(_GUTTER + scale.plot_px + 8, y + 19, f"time, {scale.unit.symbol}"))
    return lines


def _legend(kinds: list[Kind], chunks: int, curves: list[str], y: float) -> list[str]:
    """Swatches in a row; a kind has one for each end of its shades where stages are virtual."""
    entries = [
        (LABELS[kind], [f'fill="{color}"' for color in shades_of(kind, chunks)]) for kind in kinds
    ]
    entries.append(("idle", ['class="idle"']))
    entries += [(curve, ['class="curve"']) for curve in curves]
    if chunks > 1:
        entries.append(("lighter: a rank's later stages", []))
    lines, x = [], float(_GUTTER)
    for label, looks in entries:
        for look in looks:
            lines.append(_rect(x, y, 13, 13, look))
            x += 14
        lines.append(_text(x + 5, y + 11, label))
        x += 22 + 6.4 * len(label)
    return lines


def _rect(x: float, y: float, width: float, height: float, look: str, inside: str = "") -> str:
    size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.3))}" height="{_n(height)}"'
    return f"<rect {size} {look}>{inside}</rect>" if inside else f"<rect {size} {look}/>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="rule" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _text(x: float, y: float, text: str, look: str = "") -> str:
    named = f' class="{look}"' if look else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{named}>{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
