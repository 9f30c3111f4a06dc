"""The grid in the terminal: a row a rank, time from left to right, a microbatch number a cell.

With colours a cell is a coloured block with the microbatch's number, and a rank's later stages
are lighter. Without, it is written out in PyTorch's notation (`F3`, or `4F3` where ranks hold
several stages) and followed by dashes as long as it lasts, so that a log file stays readable.
A picture wider than the terminal is continued below; one that would be too long that way is
scaled down to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.style import Style
from rich.text import Text

from fullbore.ir import Kind
from fullbore.timeline import Timeline
from fullbore.view.palette import IDLE_TERMINAL, LABELS, ink, shade
from fullbore.view.raster import Bar, rows
from fullbore.view.units import ticks, time_unit

__all__ = ["render_grid"]

Floats = npt.NDArray[np.float64]

_MOST_LINES = 48  # a picture that needs more when wrapped is scaled down instead
_TICK_COLUMNS = 12
_IDLE = "."
_FILL = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """How the time axis is cut into lines: `columns` a line, `lines` lines, `per_s` columns/s.

    scaled: whether it was pressed into one line, too narrow for labels.
    """

    columns: int
    lines: int
    per_s: float
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One character of the grid and its style."""

    character: str
    style: Style


_GAP = _Cell(character=" ", style=Style.null())
_IDLE_CELLS = {
    True: _Cell(character=" ", style=Style(bgcolor=IDLE_TERMINAL)),
    False: _Cell(character=_IDLE, style=Style.null()),
}


def render_grid(
    timeline: Timeline, *, width: int, color: bool, slack_s: Floats | None = None
) -> Text:
    """The compute actions of a timeline as text for a rich console `width` columns wide.

    color: False where the output is no terminal; then nothing depends on colour. Lines never
    exceed `width` (but a width under 24 is taken as 24). slack_s: for each span [n]; cells then
    say by how much an action may slip, in the axis' unit, instead of which microbatch it is for.
    """
    gutter = len(f"rank {timeline.ranks - 1}") + 2
    columns = max(24, width) - gutter
    labels = (
        _names(timeline, color=color) if slack_s is None else _slips(timeline, slack_s, color=color)
    )
    compute = np.flatnonzero(timeline.is_compute).tolist()
    frame = _frame(timeline, columns, 1 + max((len(labels[span]) for span in compute), default=0))
    grid = _grid(timeline, frame, labels, color=color)
    text = Text(no_wrap=True, end="")
    for line in range(frame.lines):
        begin = line * frame.columns
        end = min(begin + frame.columns, len(grid[0]))
        text.append(" " * gutter + _axis(timeline, frame, begin, end) + "\n", style="dim" * color)
        for rank, cells in enumerate(grid):
            text.append(f"rank {rank}".ljust(gutter))
            _append_cells(text, cells[begin:end])
            text.append("\n")
    told = _told(timeline, frame, color=color, chunks=_chunks(timeline))
    if slack_s is not None:
        told += [
            Text("! critical"),
            Text(f"+x may end x {time_unit(timeline.makespan_s).symbol} later"),
        ]
    return text.append_text(_flow(told, max(24, width)))


def _chunks(timeline: Timeline) -> int:
    pairs = np.unique(timeline.rank.astype(np.int64) << 32 | timeline.stage)
    return int(np.bincount(pairs >> 32).max(initial=1))


def _stages_need_numbers(timeline: Timeline) -> bool:
    """Whether a rank holds several stages, or one that is not named like the rank."""
    return bool((timeline.rank != timeline.stage).any())


def _names(timeline: Timeline, *, color: bool) -> list[str]:
    """A label for each span: its microbatch, and where no colour says them, kind and stage."""
    microbatches = [str(microbatch) for microbatch in timeline.microbatch.tolist()]
    if color:
        return microbatches
    kinds = [Kind(kind).name for kind in timeline.kind.tolist()]
    numbered = _stages_need_numbers(timeline)
    stages = [str(stage) if numbered else "" for stage in timeline.stage.tolist()]
    return ["".join(parts) for parts in zip(stages, kinds, microbatches, strict=True)]


def _slips(timeline: Timeline, slack_s: Floats, *, color: bool) -> list[str]:
    """A label for each span: `!` where it is critical, or by how much it may slip."""
    unit, least_s = time_unit(timeline.makespan_s), 1e-9 * timeline.makespan_s
    slips = [
        "!"
        if slip_s <= least_s
        else "+" + unit.number(slip_s, digits=2)
        if np.isfinite(slip_s)
        else ""
        for slip_s in slack_s.tolist()
    ]
    if color:
        return slips
    kinds = (Kind(kind).name for kind in timeline.kind.tolist())
    return [kind + slip for kind, slip in zip(kinds, slips, strict=True)]


def _frame(timeline: Timeline, columns: int, label_width: int) -> _Frame:
    """Labels in full where that takes a sane number of lines, else everything on one line."""
    extent_s = timeline.makespan_s
    duration_s = (timeline.end_s - timeline.start_s)[timeline.is_compute]
    duration_s = duration_s[duration_s > 0]
    if not len(duration_s):
        return _Frame(columns=columns, lines=1, per_s=0.0)
    per_s = label_width / float(np.quantile(duration_s, 0.1, method="lower"))
    whole = max(label_width, columns - columns % label_width)
    needed = math.floor(extent_s * per_s + 0.5)
    if needed <= columns:
        return _Frame(columns=columns, lines=1, per_s=per_s)
    lines = math.ceil(needed / whole)
    if lines * (timeline.ranks + 1) <= _MOST_LINES:
        return _Frame(columns=whole, lines=lines, per_s=per_s)
    return _Frame(columns=columns, lines=1, per_s=columns / extent_s, scaled=True)


def _grid(
    timeline: Timeline, frame: _Frame, labels: list[str], *, color: bool
) -> list[list[_Cell]]:
    """The cells [P][columns of all lines together]."""
    total = max(1, math.floor(timeline.makespan_s * frame.per_s + 0.5))
    laid = rows(timeline, columns=total, columns_per_s=frame.per_s)
    grid = []
    for bars in laid.bars:
        cells = [_IDLE_CELLS[color]] * total
        for bar in bars:
            label = labels[bar.span] if bar.span >= 0 else ""
            _paint(cells, bar, label, color=color, chunks=laid.chunks)
        grid.append(cells)
    return grid


def _paint(cells: list[_Cell], bar: Bar, label: str, *, color: bool, chunks: int) -> None:
    if bar.strength <= 0.5:
        return
    begin = min(math.floor(bar.left + 0.5), len(cells) - 1)
    end = min(max(begin + 1, math.floor(bar.right + 0.5)), len(cells))
    kind = bar.kind
    if color:
        ground = shade(kind, chunk=bar.chunk, chunks=chunks)
        style = Style(color=ink(ground), bgcolor=ground)
        text = _block(label, end - begin)
    else:
        style = Style.null()
        text = _dashes(label, end - begin, kind.name if bar.chunk == 0 else kind.name.lower())
        if text[0] == label[:1] and begin and cells[begin - 1] is _IDLE_CELLS[False]:
            cells[begin - 1] = _GAP
    cells[begin:end] = [_Cell(character=character, style=style) for character in text]


def _block(label: str, width: int) -> str:
    """A coloured block: the number in its middle, where a column stays free before it."""
    shown = label if len(label) < width else ""
    return (" " * ((width - len(shown) + 1) // 2) + shown).ljust(width)


def _dashes(label: str, width: int, letter: str) -> str:
    """Without colours: label, dashes as long as it lasts, and a gap; the letter where narrow."""
    if not label or len(label) >= width:
        return letter * width
    return label.ljust(width - 1, _FILL) + " "


def _append_cells(text: Text, cells: list[_Cell]) -> None:
    run, style = "", Style.null()
    for cell in cells:
        if cell.style is not style and run:
            text.append(run, style)
            run = ""
        style = cell.style
        run += cell.character
    text.append(run, style)


def _axis(timeline: Timeline, frame: _Frame, begin: int, end: int) -> str:
    """The time axis over columns begin..end of the grid."""
    extent_s = timeline.makespan_s
    if frame.per_s == 0.0:
        return "no compute action"
    unit = time_unit(extent_s)
    across = max(2, math.ceil(extent_s * frame.per_s / _TICK_COLUMNS))
    line = [" "] * (end - begin)
    for tick_s in ticks(extent_s, at_most=across):
        at = math.floor(tick_s * frame.per_s + 0.5) - begin
        text = unit.number(tick_s, digits=6) + (f" {unit.symbol}" if tick_s == 0.0 else "")
        if 0 <= at <= len(line) - len(text):
            line[at : at + len(text)] = text
    return "".join(line).rstrip()


def _told(timeline: Timeline, frame: _Frame, *, color: bool, chunks: int) -> list[Text]:
    """What the legend has to say."""
    present = [Kind(int(kind)) for kind in np.unique(timeline.kind[timeline.is_compute])]
    entries = [_entry(kind, color=color) for kind in present]
    idle = "   " if color else _IDLE
    entries.append(Text.assemble((idle, _IDLE_CELLS[color].style), " idle"))
    if chunks > 1 and (color or frame.scaled):
        entries.append(Text("lighter: later stages" if color else "small letters: later stages"))
    if frame.scaled:
        unit = time_unit(timeline.makespan_s)
        entries.append(Text(f"a column: {unit.number(1 / frame.per_s, digits=3)} {unit.symbol}"))
    return entries


def _entry(kind: Kind, *, color: bool) -> Text:
    if not color:
        return Text(f"{kind.name} {LABELS[kind]}")
    ground = shade(kind, chunk=0, chunks=1)
    return Text.assemble(
        (f" {kind.name} ", Style(color=ink(ground), bgcolor=ground)), f" {LABELS[kind]}"
    )


def _flow(entries: list[Text], width: int) -> Text:
    """Entries beside one another, in as many lines as the width asks for."""
    flowed, used = Text(), 0
    for entry in entries:
        if used and used + 3 + len(entry) > width:
            flowed.append("\n")
            used = 0
        elif used:
            flowed.append("   ")
            used += 3
        flowed.append_text(entry)
        used += len(entry)
    return flowed
