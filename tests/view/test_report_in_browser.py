"""The report in a real Chromium: zooms, pans and tells times, without network and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fullbore.ir import Kind
from fullbore.view import Panel, html

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LIMIT_MS = 20_000

# Where an action's bar has its middle on the screen.
CENTRE = """([number, name]) => {
  const { charts, view } = fullboreReport;
  const chart = charts[number];
  const [, stage, kind, microbatch] = name.match(/^(\\d+)([A-Z_]+)(\\d+)$/);
  const code = chart.kinds.findIndex((entry) => entry.name === kind);
  const lane = code < 5 ? chart.compute : chart.communication;
  const at = lane.find(Number(stage), code, Number(microbatch));
  const rank = lane.offsets.findIndex((offset) => offset > at) - 1;
  const box = chart.canvas.getBoundingClientRect();
  const below = code < 5 ? chart.barPx / 2 : chart.barPx + 3 + 4 * chart.kinds[code].lane;
  const middle = (lane.start[at] + lane.end[at]) / 2;
  return [box.left + chart.xOf(view, middle), box.top + chart.rowTop(rank) + below];
}"""


@dataclass(slots=True, kw_only=True)
class Opened:
    """A page showing a report, with everything that it asked for and complained about."""

    page: object
    url: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def range(self) -> tuple[float, float, str]:
        """The visible stretch of time as the toolbar says it."""
        self.page.evaluate("() => new Promise(requestAnimationFrame)")
        text = self.page.inner_text("#range")
        begin, end, unit = re.fullmatch(r"(\S+) – (\S+) (\S+)", text).groups()
        return float(begin), float(end), unit

    def centre(self, action: str, *, panel: int = 0) -> tuple[float, float]:
        return tuple(self.page.evaluate(CENTRE, [panel, action]))

    def hover(self, action: str, *, panel: int = 0) -> str:
        """The tooltip over an action's bar, its words one blank apart."""
        self.page.mouse.move(*self.centre(action, panel=panel))
        return self.tooltip()

    def tooltip(self) -> str:
        self.page.wait_for_selector("#tooltip", state="visible")
        return " ".join(self.page.inner_text("#tooltip").split())

    def pixels(self, panel: int = 0) -> str:
        """What a chart's canvas shows, to be compared."""
        self.page.evaluate("() => new Promise(requestAnimationFrame)")
        return self.page.evaluate("n => fullboreReport.charts[n].canvas.toDataURL()", panel)


@pytest.fixture(scope="module")
def browser(browser_path: str) -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=browser_path, args=FLAGS, timeout=LIMIT_MS
        )
        yield launched
        launched.close()


@pytest.fixture
def show(browser, tmp_path: Path):
    """Opens panels in the browser; afterwards nothing may have been requested or gone wrong."""
    shown: list[Opened] = []

    def open_(panels: list[Panel], *, width: int = 1280, height: int = 900, **more) -> Opened:
        file = tmp_path / f"report{len(shown)}.html"
        file.write_text(html.render(title="Report", panels=panels), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        context.set_default_timeout(LIMIT_MS)
        context.set_offline(True)
        opened = Opened(page=context.new_page(), url=file.as_uri())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.goto(opened.url)
        shown.append(opened)
        return opened

    yield open_
    for opened in shown:
        opened.page.context.close()
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith("data:")] == [opened.url]


@pytest.fixture
def two(simulated) -> list[Panel]:
    return [simulated(title="predicted"), simulated(title="measured", scale=1.25)]


def test_hovering_tells_an_action_its_exact_times_and_the_other_panels(show, two):
    said = show(two).hover("2B3")
    assert said.startswith(
        "2B3 backward rank 2 stage 2 microbatch 3 start 15 s end 17 s duration 2 s"
    )
    assert "in “measured” start 18.75 s duration 2.5 s (+25.0 %)" in said
    assert "live activations 2" in said


@pytest.mark.parametrize("action", ["0F0", "3F7", "0B7", "1F5"])
def test_the_tooltip_is_right_wherever_one_points(show, two, action):
    report = show(two)
    span = next(s for s in two[1].timeline if str(s.action) == action)
    said = report.hover(action, panel=1)
    duration_s = span.end_s - span.start_s
    assert said.startswith(f"{action} ")
    assert f"start {span.start_s:g} s end {span.end_s:g} s duration {duration_s:g} s" in said


def test_idle_time_and_messages_tell_their_times_too(show, simulated):
    report = show([simulated(hop_s=0.5)])
    assert report.hover("0SEND_F0").startswith("0SEND_F0 send of an activation rank 0")
    x, y = report.centre("0F0")
    wide = report.page.evaluate("fullboreReport.charts[0].right - fullboreReport.charts[0].left")
    report.page.mouse.move(x + wide * 6 / report.range()[1], y)
    assert report.tooltip().startswith("idle rank 0 start 4 s")


def test_the_memory_curve_tells_its_value(show, simulated):
    report = show([simulated()])
    x, y = report.centre("0B0")
    report.page.mouse.move(x, y + 36)
    assert re.fullmatch(r"rank 0 at 1[01]\S* s live activations 4", report.tooltip())


def test_the_wheel_zooms_where_it_points_in_every_panel(show, two):
    report = show(two)
    before = report.pixels(1)
    x, y = report.centre("2F4")
    report.page.mouse.move(x, y)
    for _ in range(6):
        report.page.mouse.wheel(0, -150)
    begin, end, unit = report.range()
    assert (unit, 0 < begin < 16 < end < 41.25) == ("s", True)
    assert abs(report.centre("2F4")[0] - x) < 2, "what is under the pointer stays there"
    assert report.tooltip().startswith("2F4")
    assert report.pixels(1) != before
    for _ in range(12):
        report.page.mouse.wheel(0, 150)
    assert report.range() == (0, 41.25, "s")


def test_buttons_and_keys_zoom_pan_and_reset(show, two):
    report = show(two)
    whole = (0.0, 41.25, "s")
    assert report.range() == whole
    report.page.get_by_role("button", name="Zoom in").click()
    begin, end, _ = report.range()
    assert (begin, end) == pytest.approx((41.25 / 4, 41.25 * 3 / 4), rel=1e-5)
    report.page.get_by_role("button", name="Zoom out").click()
    assert report.range() == whole
    report.page.locator(".stage").first.focus()
    report.page.keyboard.press("+")
    report.page.keyboard.press("+")
    zoomed = report.range()
    assert zoomed[1] - zoomed[0] == pytest.approx(41.25 / 4, rel=1e-4)
    report.page.keyboard.press("ArrowRight")
    assert report.range()[0] > zoomed[0]
    report.page.keyboard.press("Home")
    assert report.range()[0] == 0
    report.page.get_by_role("button", name="Show the whole step").click()
    assert report.range() == whole


def test_dragging_pans_and_stops_at_the_ends(show, two):
    report = show(two)
    report.page.get_by_role("button", name="Zoom in").click()
    begin = report.range()[0]
    x, y = report.centre("1B3")
    report.page.mouse.move(x, y)
    report.page.mouse.down()
    report.page.mouse.move(x + 120, y, steps=4)
    report.page.mouse.up()
    assert report.range()[0] < begin
    report.page.mouse.move(x, y)
    report.page.mouse.down()
    report.page.mouse.move(x + 3000, y, steps=4)
    report.page.mouse.up()
    assert report.range()[0] == 0


def test_leaving_the_chart_hides_the_tooltip(show, two):
    report = show(two)
    report.hover("1F1")
    report.page.mouse.move(5, 5)
    report.page.wait_for_selector("#tooltip", state="hidden")


def test_colours_on_the_canvas_are_those_of_the_kinds(show, simulated):
    report = show([simulated("interleaved", virtual_stages=2)])

    def color(action: str) -> str:
        x, y = report.centre(action)
        return report.page.evaluate(
            """([x, y]) => {
              const { canvas, ratio } = fullboreReport.charts[0];
              const box = canvas.getBoundingClientRect();
              const copy = document.createElement("canvas").getContext("2d");
              copy.drawImage(canvas, -(x - box.left) * ratio, -(y - box.top - 9) * ratio);
              const data = [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
              return "#" + data.map((value) => value.toString(16).padStart(2, "0")).join("");
            }""",
            [x, y],
        )

    seen = {action: color(action) for action in ("0F0", "4F0", "0B0", "4B0")}
    wanted = report.page.evaluate("fullboreReport.charts[0].data.colors")
    assert seen == {
        "0F0": wanted[0][0],
        "4F0": wanted[0][1],
        "0B0": wanted[1][0],
        "4B0": wanted[1][1],
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_differ_and_both_draw(show, two, scheme):
    report = show(two, color_scheme=scheme)
    ground = report.page.evaluate("getComputedStyle(document.body).backgroundColor")
    level = sum(map(int, re.findall(r"\d+", ground)[:3]))
    assert level > 600 if scheme == "light" else level < 150
    assert report.hover("0F1").startswith("0F1")


def test_a_phone_has_no_sideways_scrolling_and_taps_work(show, two):
    report = show(two, width=390, height=780, has_touch=True, is_mobile=True)
    wide = report.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    report.page.touchscreen.tap(*report.centre("1B2"))
    assert report.tooltip().startswith("1B2 backward")
    box = report.page.locator("#tooltip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_a_tall_chart_keeps_its_axis_while_the_page_scrolls(show, simulated):
    report = show([simulated(ranks=64, microbatches=64)], height=700)
    page = report.page
    assert page.evaluate("fullboreReport.charts[0].canvas.height") <= 700
    page.evaluate("window.scrollTo(0, 1200)")
    report.range()
    top = page.evaluate("fullboreReport.charts[0].canvas.getBoundingClientRect().top")
    assert top == pytest.approx(page.locator("#toolbar").bounding_box()["height"], abs=1)
    rank = page.evaluate(
        "Math.ceil(fullboreReport.charts[0].offset / fullboreReport.charts[0].rowPx)"
    )
    assert rank > 10
    assert report.hover(f"{rank + 2}F9").startswith(f"{rank + 2}F9 forward rank {rank + 2}")


def test_names_reach_the_page_as_text(show, drawn):
    evil = "</script><img src=x onerror=alert(1)>"
    panel = Panel(title=evil, timeline=drawn((0, "0F0", 0, 1)), facts=(evil,))
    report = show([panel, panel])
    assert report.page.inner_text("h2 >> nth=0") == evil
    assert report.page.locator("img").count() == 0
    assert f"in “{evil}”" in report.hover("0F0")


def test_a_hundred_thousand_spans_can_be_zoomed_into(show, simulated):
    panel = simulated(ranks=8, microbatches=2200)
    report = show([panel])
    assert report.page.evaluate(
        "fullboreReport.charts[0].compute.kind.length + "
        "fullboreReport.charts[0].communication.kind.length"
    ) == len(panel.timeline)
    report.page.evaluate("fullboreReport.charts[0].stage.focus()")
    for _ in range(9):
        report.page.keyboard.press("+")
    begin, end, _ = report.range()
    timeline, middle = panel.timeline, (begin + end) / 2
    at = np.argmax(timeline.is_compute & (timeline.rank == 3) & (timeline.end_s > middle))
    action = f"3{Kind(timeline.kind[at]).name}{timeline.microbatch[at]}"
    assert report.hover(action).startswith(f"{action} ")
    assert f"start {timeline.start_s[at]:g} s" in report.tooltip()


def test_the_tables_are_there_for_those_who_cannot_see_the_charts(show, two):
    page = show(two).page
    page.get_by_text("Numbers, a row a rank").first.click()
    cells = page.locator("details[open] tbody tr").first.inner_text().split("\t")
    assert cells == ["rank 0", "0", "16", "0", "33", "24", "9", "4"]
    assert page.locator("button:not([aria-label])").count() == 0
    assert page.locator(".stage[aria-label]").count() == 2
