"""The SVG picture, parsed as XML and measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from fullbore.ir import Kind
from fullbore.view import Panel, svg
from fullbore.view.palette import shade

SVG = "{http://www.w3.org/2000/svg}"


def rectangles(picture: str) -> list[ET.Element]:
    return list(ET.fromstring(picture).iter(f"{SVG}rect"))


def hints(picture: str) -> dict[str, ET.Element]:
    """The bars by their hover text."""
    found = {}
    for rectangle in rectangles(picture):
        title = rectangle.find(f"{SVG}title")
        if title is not None:
            found[title.text] = rectangle
    return found


def texts(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_every_action_is_a_bar_where_it_belongs(simulated):
    panel = simulated()
    bars = hints(svg.render([panel]))
    assert len(bars) == 64
    per_s = (1200 - 72 - 76) / 33.0
    bar = bars["3B7: 25 to 27 s"]
    assert float(bar.get("x")) == pytest.approx(72 + 25 * per_s, abs=0.01)
    assert float(bar.get("width")) == pytest.approx(2 * per_s - 0.6, abs=0.01)
    assert bar.get("fill") == shade(Kind.B, chunk=0, chunks=1)
    rows = {key[0]: float(bar.get("y")) for key, bar in bars.items()}
    assert rows["0"] < rows["1"] < rows["2"] < rows["3"]


def test_idle_is_a_grey_bar_beneath_each_rank(simulated):
    panel = simulated()
    grey = [r for r in rectangles(svg.render([panel])) if r.get("class") == "idle"]
    assert len(grey) == panel.timeline.ranks + 1  # and one in the legend
    assert float(grey[0].get("width")) == pytest.approx(1200 - 72 - 76)


def test_title_axis_units_and_legend_are_written(simulated):
    said = texts(svg.render([simulated("interleaved", title="Interleaved", virtual_stages=2)]))
    for wanted in ("Interleaved", "time, s", "forward", "backward", "idle", "rank 3", "10"):
        assert wanted in said
    assert "lighter: a rank's later stages" in said
    assert "live activations, microbatches × 1/P of the model" in said
    assert "peak 5.5" in said


def test_numbers_stand_in_bars_that_are_wide_enough(simulated):
    wide, narrow = svg.render([simulated()]), svg.render([simulated()], width_px=400)
    count = [picture.count('class="number"') for picture in (wide, narrow)]
    assert count[0] == 64
    assert count[1] < 64


def test_panels_share_their_time_axis(simulated):
    slow, fast = simulated(title="slow", scale=2.0), simulated(title="fast")
    picture = svg.render([slow, fast])
    widths = [float(r.get("width")) for r in rectangles(picture) if r.get("class") == "idle"]
    assert widths[0] == pytest.approx(2 * widths[4], abs=0.01)
    bars = hints(picture)
    assert float(bars["0F1: 2 to 4 s"].get("x")) < float(bars["0F3: 3 to 4 s"].get("x"))


def test_light_and_dark_have_grounds_of_their_own(simulated):
    picture = svg.render([simulated()])
    assert "prefers-color-scheme: dark" in picture
    grounds = re.findall(r"\.ground \{ fill: (#\w+) \}", picture)
    assert len(set(grounds)) == 2


def test_names_are_escaped(drawn):
    panel = Panel(
        title='<script>"&',
        timeline=drawn((0, "0F0", 0, 1)),
        facts=("a < b & c",),
        curve_name="<x>",
    )
    picture = svg.render([panel])
    assert "<script" not in picture
    assert '<script>"&' in texts(picture)
    assert "a < b & c" in texts(picture)
    assert ET.fromstring(picture).get("aria-label") == '<script>"&'


def test_a_large_timeline_stays_small(simulated):
    panel = simulated(ranks=16, microbatches=2000)
    picture = svg.render([panel])
    assert panel.timeline.is_compute.sum() == 64_000
    assert len(rectangles(picture)) < 16 * 1100
    assert len(picture) < 2_500_000


def test_a_thousand_ranks_are_bounded_too(simulated):
    panel = simulated("gpipe", ranks=1024, microbatches=32)
    picture = svg.render([replace(panel, curves=())])
    assert len(rectangles(picture)) < 220_000


@pytest.mark.parametrize("width_px", [10, 400, 3000])
def test_any_width(simulated, width_px):
    root = ET.fromstring(svg.render([simulated()], width_px=width_px))
    assert int(root.get("width")) == max(400, width_px)


def test_nothing_to_draw_is_still_a_picture(drawn):
    empty = drawn((0, "0SEND_F0", 0.0, 0.0), ranks=2)
    assert "rank 1" in texts(svg.render([Panel(title="empty", timeline=empty)]))
    assert ET.fromstring(svg.render([])).tag == f"{SVG}svg"
