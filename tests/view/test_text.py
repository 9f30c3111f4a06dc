"""The terminal grid, drawn, measured and held against the timeline."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from fullbore.ir import Kind
from fullbore.view.palette import IDLE_TERMINAL, shade
from fullbore.view.text import render_grid

ONE_F_ONE_B = """\
        0 s            5              10             15             20             25
rank 0  F0 F1 F2 F3 ................. B0--- F4 B1--- F5 B2--- .. B3--- .. B4--- .. B5---
rank 1  .. F0 F1 F2 ........... B0--- F3 B1--- F4 B2--- F5 B3--- .. B4--- .. B5--- ......
rank 2  ..... F0 F1 ..... B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .. B5--- ............
rank 3  ........ F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- ..................
F forward   B backward   . idle"""

INTERLEAVED_WRAPPED = """\
        0 s             2               4
rank 0  0F0 0F1 2F0 2F1 ....... 2B0---- ... 2B1-
rank 1  ... 1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0-
                6
rank 0  --- 0B0---- 0B1----
rank 1  --- 1B1---- ........
F forward   B backward   . idle"""


def plain(timeline, width: int) -> str:
    """The grid without colours, line ends trimmed."""
    text = render_grid(timeline, width=width, color=False).plain
    return "\n".join(line.rstrip() for line in text.splitlines())


def labels(grid: str) -> list[str]:
    """All actions written out in a grid."""
    rows = [line for line in grid.splitlines() if line.startswith("rank")]
    return re.findall(r"\d*[FBIW]\d+", " ".join(row.split(maxsplit=2)[2] for row in rows))


def styles_of(text, row: int, gutter: int) -> list[tuple[str, str | None]]:
    """For each column of one row of a coloured grid: its character and its ground."""
    line = text.split("\n")[row]
    found = []
    for column in range(gutter, len(line.plain)):
        style = line.get_style_at_offset(Console(color_system="truecolor"), column)
        name = style.bgcolor.name if style.bgcolor else None
        found.append((line.plain[column], name))
    return found


def test_one_f_one_b_as_drawn(simulated):
    assert plain(simulated(microbatches=6).timeline, 100) == ONE_F_ONE_B


def test_interleaved_names_stages_and_continues_below(simulated):
    panel = simulated("interleaved", ranks=2, microbatches=2, virtual_stages=2)
    assert plain(panel.timeline, 50) == INTERLEAVED_WRAPPED


@pytest.mark.parametrize("width", [60, 100, 400])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_every_action_is_written_once(simulated, width, virtual_stages):
    family = "interleaved" if virtual_stages > 1 else "1f1b"
    timeline = simulated(family, virtual_stages=virtual_stages).timeline
    spans = [span.action for span in timeline if span.action.kind < Kind.SEND_F]
    wanted = [str(a) if virtual_stages > 1 else f"{a.kind.name}{a.microbatch}" for a in spans]
    assert sorted(labels(plain(timeline, width))) == sorted(wanted)


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [24, 40, 79, 80, 133, 300])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (4, 8), (8, 300), (64, 64)])
def test_no_line_is_wider_than_asked(simulated, width, ranks, microbatches, color):
    timeline = simulated(ranks=ranks, microbatches=microbatches).timeline
    text = render_grid(timeline, width=width, color=color)
    assert max(map(len, text.plain.splitlines())) <= width
    assert len(text.plain.splitlines()) <= max(60, ranks + 6)


def test_printed_without_colours_there_is_no_escape_code(simulated):
    timeline = simulated(microbatches=6).timeline
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render_grid(timeline, width=100, color=False))
    printed = console.file.getvalue()
    assert "\x1b" not in printed and printed.isascii()
    assert [line.rstrip() for line in printed.splitlines()] == ONE_F_ONE_B.splitlines()


def test_printed_with_colours_idle_is_grey_and_chunks_have_shades(simulated):
    panel = simulated("interleaved", ranks=2, microbatches=2, virtual_stages=2)
    row = styles_of(render_grid(panel.timeline, width=80, color=True), 2, len("rank 1  "))
    first, second = (shade(Kind.F, chunk=chunk, chunks=2) for chunk in (0, 1))
    backward = shade(Kind.B, chunk=1, chunks=2)
    # rank 1: idle, F0 and F1 of its first stage, F0 of its second, then the latter's backward
    assert [ground for _, ground in row[:12:2]] == [
        IDLE_TERMINAL,
        first,
        first,
        second,
        backward,
        backward,
    ]
    assert "".join(character for character, _ in row[:12]) == "   0 1 0  0 "
    assert first != second


def test_a_long_step_is_scaled_and_says_so(simulated):
    panel = simulated(ranks=8, microbatches=256)
    grid = plain(panel.timeline, 108)
    rows = [line.split(maxsplit=2)[2] for line in grid.splitlines() if line.startswith("rank")]
    assert [len(row) for row in rows] == [100] * 8
    assert set("".join(rows)) == set("FB.")
    assert "a column: 7.89 s" in grid
    idle = sum(row.count(".") for row in rows) / 800
    assert idle == pytest.approx(7 / (256 + 7), abs=0.02)


def test_small_letters_tell_later_stages_when_scaled(simulated):
    panel = simulated("interleaved", ranks=8, microbatches=256, virtual_stages=2)
    grid = plain(panel.timeline, 108)
    assert "small letters: later stages" in grid
    rows = [line.split(maxsplit=2)[2] for line in grid.splitlines() if line.startswith("rank")]
    assert set("".join(rows)) == set("FBfb.")


def test_measured_times_need_no_common_unit(drawn):
    timeline = drawn((0, "0F0", 0.0, 0.0101), (0, "0F1", 0.0102, 0.0199), (0, "0B0", 0.031, 0.0523))
    row = plain(timeline, 60).splitlines()[1]
    assert re.fullmatch(r"rank 0  F0 F1 \.+ B0-+", row)
    assert "ms" in plain(timeline, 60)


def test_nothing_to_draw(drawn):
    empty = drawn((0, "0SEND_F0", 0.0, 1.0), ranks=2)
    assert "no compute action" in plain(empty, 80)
    instant = drawn((0, "0F0", 0.0, 0.0))
    assert "rank 0" in plain(instant, 80)


def test_split_backwards_have_letters_of_their_own(drawn):
    timeline = drawn((0, "0F0", 0, 1), (0, "0I0", 1, 2), (0, "0W0", 2, 3))
    grid = plain(timeline, 80)
    assert "F0 I0 W0" in grid
    assert "I backward, input gradient   W backward, weight gradient" in grid


def test_a_legend_wider_than_the_terminal_is_broken(drawn):
    timeline = drawn((0, "0F0", 0, 1), (0, "0I0", 1, 2), (0, "0W0", 2, 3))
    lines = plain(timeline, 30).splitlines()
    assert lines[2:] == [
        "F forward",
        "I backward, input gradient",
        "W backward, weight gradient",
        ". idle",
    ]


def test_the_same_timeline_gives_the_same_grid(simulated):
    timeline = simulated().timeline
    first = render_grid(timeline, width=90, color=True)
    second = render_grid(timeline, width=90, color=True)
    assert first == second
    assert np.isfinite(timeline.end_s).all()
