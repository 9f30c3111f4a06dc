"""Points of two quantities: in text where they belong, in SVG with round ticks and their names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from fullbore.view.scatter import Point, scatter_svg, scatter_text

POINTS = [
    Point(x=10.0, y=4.0, front=True, label="small & slow"),
    Point(x=20.0, y=2.0, front=True, label="large <fast>"),
    Point(x=20.0, y=4.0, front=False, label="neither"),
]


def test_text_has_each_point_where_it_belongs():
    lines = scatter_text(POINTS, x="GiB", y="seconds").splitlines()
    rows = [line.split("│")[1] for line in lines if "│" in line]
    top, bottom = rows[0], rows[-1]
    assert top.index("*") < top.index("·")
    assert bottom.index("*") == top.index("·")
    assert sum(row.count("*") for row in rows) == 2
    assert lines[0].startswith("seconds") and lines[-1].endswith("GiB")


def test_one_point_alone_is_a_picture_too():
    assert "*" in scatter_text(POINTS[:1], x="x", y="y")
    ElementTree.fromstring(scatter_svg(POINTS[:1], x="x", y="y", title="one"))


def test_svg_has_points_names_and_round_ticks():
    svg = scatter_svg(POINTS, x="GiB", y="seconds", title="memory & time")
    root = ElementTree.fromstring(svg)
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    named = {circle[0].text: circle for circle in circles}
    assert set(named) == {point.label for point in POINTS}
    small, large = named["small & slow"], named["large <fast>"]
    assert float(small.get("cx")) < float(large.get("cx"))
    assert float(small.get("cy")) < float(large.get("cy"))
    ticks = {node.text for node in root.iter() if node.tag.endswith("text")}
    assert {"10", "20", "2", "4"} <= ticks
    assert not re.search(r"https?:", svg)
