"""The report: one self-contained HTML page of tables and zoomable timelines, without network.

The charts are a small script of our own on canvas. A plotting library such as plotly would put
about 4.5 MB into each report and slow down beyond ten thousand bars; this one is some 25 KB,
draws only what is visible, and knows what an action is. Script and style sheet lie in `assets`
and are inlined; a content security policy in the page forbids any request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.ir import COMPUTE_KINDS, COPY_KINDS, Kind
from fullbore.view.embed import embed_report
from fullbore.view.palette import LABELS, shade, shades_of
from fullbore.view.panel import Panel, chunk_of_span, extent_s
from fullbore.view.units import TimeUnit, amount, time_unit

__all__ = ["Remarks", "Table", "render"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_MESSAGES = {
    "send": (Kind.SEND_F, Kind.SEND_B),
    "wait for a message": (Kind.RECV_F, Kind.RECV_B),
}
_HELP = (
    "Wheel, pinch, the buttons or the keys + and − zoom; drag or ← and → pan; 0 shows everything "
    "again (click a chart first to use keys). Point at an action, or tap it, for its exact times: "
    "its microbatch is outlined on every rank, and panels of the same schedule show theirs. "
    "Thin lanes beneath a rank: sends above, waits for messages below, then copies to the host and "
    "back, where there are any. "
    "The violet area: what the rank holds, all ranks of a panel to one scale."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the report: text as it shall be read; the first column names the row.

    words: whether the cells are sentences, and not numbers.
    """

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.rows}
        assert lengths <= {len(self.headers)}, "each row needs a cell for each header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """Text to open beneath the tables: what each term means, or how it was obtained."""

    title: str
    entries: tuple[tuple[str, str], ...]


def render(
    *,
    title: str,
    panels: Sequence[Panel],
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
    remarks: Sequence[Remarks] = (),
    figure: str = "",
) -> str:
    """The page as text (UTF-8): title, notes, tables, remarks, panels on a common time axis.

    figure: an SVG element to stand before the tables, as it is.
    """
    charts = _charts(panels, time_unit(extent_s(tuple(panels)))) if panels else ""
    drawn = [f'<section class="card">{figure}</section>'] if figure else []
    cards = [*drawn, *map(_card, tables), *map(_details, remarks)]
    body = "\n".join([_header(title, notes), *cards, charts])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("report.css")}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _charts(panels: Sequence[Panel], unit: TimeUnit) -> str:
    """Toolbar, panels, tooltip, and the data and script that bring them to life."""
    data = json.dumps(embed_report(panels, unit), separators=(",", ":"), ensure_ascii=False)
    return f"""<main>
{_toolbar(panels)}
{"".join(_panel(panel, unit) for panel in panels)}</main>
<footer>{_HELP}</footer>
<div id="tooltip" role="tooltip" hidden></div>
<script type="application/json" id="report-data">{_harmless(data)}</script>
<script>
{_asset("chart.js")}</script>
<script>
{_asset("report.js")}</script>"""


def _harmless(json_text: str) -> str:
    """JSON that cannot end its script element: `<`, `>` and `&` occur in its strings only."""
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files("fullbore.view").joinpath("assets", name).read_text(encoding="utf-8")


def _header(title: str, notes: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<header>\n<h1>{escape(title)}</h1>\n<ul class="notes">{lines}</ul>\n</header>'


def _card(table: Table) -> str:
    return f'<section class="card scroll">{_table(table)}</section>'


def _details(remarks: Remarks) -> str:
    entries = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in remarks.entries
    )
    return (
        f'<details class="card remarks"><summary>{escape(remarks.title)}</summary>'
        f"<dl>{entries}</dl></details>"
    )


def _table(table: Table) -> str:
    side = ' style="text-align:left;white-space:normal"' if table.words else ""
    first, *others = table.headers
    head = f'<th scope="col">{escape(first)}</th>'
    head += "".join(f'<th scope="col"{side}>{escape(header)}</th>' for header in others)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{side}>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    return (
        f"<table><caption>{escape(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>{rows}</tbody></table>"
    )


def _toolbar(panels: Sequence[Panel]) -> str:
    legend = _legend(panels)
    return f"""<ul class="legend apart" aria-hidden="true">{legend}</ul>
<div id="toolbar" role="toolbar" aria-label="Time axis of all charts">
<div class="buttons">
<button id="zoom-in" type="button" aria-label="Zoom in" title="Zoom in">+</button>
<button id="zoom-out" type="button" aria-label="Zoom out" title="Zoom out">−</button>
<button id="zoom-reset" type="button" aria-label="Show the whole step">Reset</button>
</div>
<output id="range" aria-live="polite" aria-label="Visible time"></output>
<ul class="legend" aria-label="Colours">{legend}</ul>
</div>
<noscript>The charts need JavaScript; the tables do not.</noscript>"""


def _legend(panels: Sequence[Panel]) -> str:
    chunks = max(int(chunk_of_span(panel.timeline).max(initial=0)) + 1 for panel in panels)
    present = set(np.unique(np.concatenate([panel.timeline.kind for panel in panels])).tolist())
    entries = [
        _swatch(shades_of(kind, chunks), LABELS[kind])
        for kind in (*COMPUTE_KINDS, *COPY_KINDS)
        if kind in present
    ]
    entries.append(_swatch(["var(--idle)"], "idle"))
    for label, kinds in _MESSAGES.items():
        if present.intersection(kinds):
            entries.append(_swatch([shade(kind, chunk=0, chunks=1) for kind in kinds], label))
    for name in dict.fromkeys(panel.curve_name for panel in panels if panel.curves):
        entries.append(_swatch(["var(--curve)"], name))
    if chunks > 1:
        entries.append("<li>lighter: a rank's later stages</li>")
    return "".join(entries)


def _swatch(colors: Sequence[str], label: str) -> str:
    blocks = "".join(f'<i style="background:{color}"></i>' for color in colors)
    return f'<li><span class="swatch">{blocks}</span>{escape(label)}</li>'


def _panel(panel: Panel, unit: TimeUnit) -> str:
    title, source = escape(panel.title), panel.timeline.source
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in panel.facts)
    return f"""<section class="card panel">
<div class="head"><h2>{title}</h2><span class="badge {source}">{source}</span></div>
<ul class="facts">{facts}</ul>
<div class="stage" tabindex="0" role="group" aria-label="Timeline of {title}: plus and minus zoom,
 arrow keys pan, 0 shows the whole step; its numbers are in the table that follows">
<canvas aria-hidden="true"></canvas></div>
<details><summary>Numbers, a row a rank</summary>
<div class="scroll">{_table(_numbers(panel, unit))}</div></details>
</section>
"""


def _numbers(panel: Panel, unit: TimeUnit) -> Table:
    """What the chart shows, for those who cannot see it: one row a rank."""
    times = tuple(f"{name}, {unit.symbol}" for name in ("first start", "last end", "busy", "idle"))
    curve = (f"peak of {panel.curve_name}, {panel.curve_unit}",) if panel.curves else ()
    timeline = panel.timeline
    compute = np.flatnonzero(timeline.is_compute)
    bounds = np.searchsorted(timeline.rank[compute], np.arange(timeline.ranks + 1)).tolist()
    end_s = timeline.makespan_s
    return Table(
        caption="",
        headers=("rank", "stages", "compute actions", *times, *curve),
        rows=tuple(
            _numbers_of(panel, rank, compute[first:last], end_s, unit)
            for rank, (first, last) in enumerate(pairwise(bounds))
        ),
    )


def _numbers_of(
    panel: Panel, rank: int, spans: npt.NDArray[np.int64], end_s: float, unit: TimeUnit
) -> tuple[str, ...]:
    start, end = panel.timeline.start_s[spans], panel.timeline.end_s[spans]
    first_s = float(start.min()) if len(spans) else 0.0
    busy_s = float((end - start).sum())
    stages = ", ".join(map(str, np.unique(panel.timeline.stage[spans])))
    times_s = (first_s, float(end.max(initial=0.0)), busy_s, end_s - busy_s)
    cells = (f"rank {rank}", stages, str(len(spans)), *(unit.number(t) for t in times_s))
    if not panel.curves:
        return cells
    return (*cells, amount(float(panel.curves[rank].values.max(initial=0.0)), panel.curve_unit))
