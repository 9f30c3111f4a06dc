"""The report's page as text: self-contained, safe with any name, and exact in its data."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from fullbore.timeline import Curve
from fullbore.view import Panel, html
from fullbore.view.panel import BYTES

EVIL = "</script><script>alert(1)</script><!-- & \u2028 \"'"
TYPES = {"f8": "<f8", "u1": "<u1", "u2": "<u2", "u4": "<u4"}


class Page(HTMLParser):
    """Collects start tags, and the text of each element by its tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts.append((self._open[-1], data))

    def said(self, tag: str) -> list[str]:
        return [text for found, text in self.texts if found == tag]


def data_of(page: str) -> dict:
    """The report's data, read as a browser finds it: up to the first end of a script."""
    begin = page.index('id="report-data">') + len('id="report-data">')
    return json.loads(page[begin : page.index("</script", begin)])


def column(data) -> np.ndarray:
    kind, text = data
    return np.frombuffer(base64.b64decode(text), dtype=TYPES[kind])


def test_nothing_comes_from_outside(simulated):
    page = html.render(title="t", panels=[simulated()])
    for tag, attributes in Page(page).tags:
        assert tag not in {"iframe", "img", "object", "embed"}
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|sendBeacon|WebSocket", page)
    policy = next(a["content"] for t, a in Page(page).tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_script_and_style_are_the_files_of_the_package(simulated):
    page = html.render(title="t", panels=[simulated()])
    assert "class Chart" in page and "fullboreReport" in page and "#tooltip" in page


def test_times_and_curves_are_exact(simulated):
    panel = simulated(hop_s=0.1)
    timeline = panel.timeline
    (data,) = data_of(html.render(title="t", panels=[panel]))["panels"]
    for lane, chosen in (
        (data["compute"], timeline.is_compute),
        (data["communication"], ~timeline.is_compute),
    ):
        seen = {
            tuple(row)
            for row in zip(
                np.repeat(np.arange(timeline.ranks), np.diff(lane["offsets"])).tolist(),
                *(column(lane[n]).tolist() for n in ("kind", "stage", "microbatch")),
                *(column(lane[n]).tolist() for n in ("start", "end")),
                strict=True,
            )
        }
        wanted = zip(
            *(getattr(timeline, n)[chosen].tolist() for n in ("rank", "kind", "stage")),
            *(getattr(timeline, n)[chosen].tolist() for n in ("microbatch", "start_s", "end_s")),
            strict=True,
        )
        assert seen == set(wanted)
        assert len(seen) == int(chosen.sum())
    for curve, embedded in zip(panel.curves, data["curves"], strict=True):
        assert np.array_equal(column(embedded["times"]), curve.times_s)
        assert np.array_equal(column(embedded["values"]), curve.values)
        assert embedded["peak"] == curve.values.max()


def test_spans_lie_sorted_by_rank_and_start(drawn):
    timeline = drawn(
        (0, "0F0", 0, 1),
        (0, "0SEND_F0", 3, 9),
        (0, "0SEND_F1", 1, 2),
        (1, "1RECV_F0", 0, 4),
        (1, "1F0", 4, 5),
    )
    (data,) = data_of(html.render(title="t", panels=[Panel(title="p", timeline=timeline)]))[
        "panels"
    ]
    assert data["communication"]["offsets"] == [0, 2, 3]
    assert column(data["communication"]["start"]).tolist() == [1, 3, 0]
    assert data["curves"] == []


def test_without_messages_there_is_no_lane_for_them(drawn):
    panel = Panel(title="p", timeline=drawn((0, "0F0", 0, 1)))
    assert data_of(html.render(title="t", panels=[panel]))["panels"][0]["communication"] is None


def test_columns_take_the_narrowest_type(drawn):
    panel = Panel(title="p", timeline=drawn((0, "0F70000", 0, 1), (0, "300B3", 1, 2)))
    compute = data_of(html.render(title="t", panels=[panel]))["panels"][0]["compute"]
    assert {n: compute[n][0] for n in ("kind", "stage", "microbatch", "start")} == {
        "kind": "u1",
        "stage": "u2",
        "microbatch": "u4",
        "start": "f8",
    }
    assert column(compute["microbatch"]).tolist() == [70000, 3]


def test_no_name_can_break_the_page(drawn):
    panel = Panel(title=EVIL, timeline=drawn((0, "0F0", 0, 1)), facts=(EVIL,))
    table = html.Table(caption=EVIL, headers=(EVIL, "b"), rows=((EVIL, EVIL),))
    text = html.render(title=EVIL, panels=[panel], tables=[table], notes=[EVIL])
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert "alert(1)</script>" not in text
    assert data_of(text)["panels"][0]["title"] == EVIL
    for tag in ("h1", "h2", "title", "caption", "li", "td"):
        assert EVIL in "".join(page.said(tag))


def test_tables_notes_and_facts_are_on_the_page(simulated):
    table = html.Table(
        caption="One job",
        headers=("schedule", "bubble"),
        rows=(("GPipe", "27.3 %"), ("1F1B", "27.3 %")),
    )
    panel = simulated(title="1F1B, predicted")
    page = Page(html.render(title="T", panels=[panel], tables=[table], notes=["a note"]))
    assert page.said("h1") == ["T"]
    assert "a note" in page.said("li")
    assert page.said("th")[:3] == ["schedule", "bubble", "GPipe"]
    assert page.said("td")[:2] == ["27.3 %", "27.3 %"]
    assert page.said("h2") == ["1F1B, predicted"]


def test_the_numbers_are_there_as_a_table_too(simulated):
    page = Page(html.render(title="T", panels=[simulated()]))
    cells = page.said("td")
    # rank 0: stage, actions, first start, last end, busy, idle, peak
    assert cells[:7] == ["0", "16", "0", "33", "24", "9", "4"]
    # rank 3
    assert cells[21:28] == ["3", "16", "3", "27", "24", "9", "1"]


def test_bytes_are_printed_as_bytes(drawn):
    curve = Curve(times_s=np.array([0.0, 1.0]), values=np.array([3.0 * 2**20, 0.0]))
    panel = Panel(title="p", timeline=drawn((0, "0F0", 0, 1)), curves=(curve,), curve_unit=BYTES)
    assert "3 MiB" in Page(html.render(title="T", panels=[panel])).said("td")


def test_a_page_needs_no_panels():
    page = html.render(title="T", panels=[], notes=["only words"])
    assert "only words" in page and "<script" not in page


def test_a_hundred_thousand_spans_make_a_page_of_a_few_megabytes(simulated):
    panel = simulated(ranks=8, microbatches=2200)
    assert len(panel.timeline) >= 95_000
    assert len(html.render(title="T", panels=[panel])) < 4_000_000


def test_curves_come_one_a_rank_or_not_at_all(simulated):
    panel = simulated()
    with pytest.raises(AssertionError, match="one curve a rank"):
        Panel(title="p", timeline=panel.timeline, curves=panel.curves[:2])
