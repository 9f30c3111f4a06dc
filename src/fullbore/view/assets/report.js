// The report's page: one visible stretch of time common to all charts, and the ways to move it.
//
// Wheel, pinch, buttons and keys zoom; dragging and arrow keys pan; hovering (or tapping) an
// action shows its exact times, here and in the other panels of the same schedule.
"use strict";

(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const unit = report.unit;
  const view = { from: 0, to: report.extent_s };
  const least = report.extent_s * 1e-7;
  const tooltip = document.getElementById("tooltip");
  const readout = document.getElementById("range");
  const toolbar = document.getElementById("toolbar");
  const stages = [...document.querySelectorAll(".stage")];
  const charts = report.panels.map((data, i) => new Chart(data, stages[i], report.kinds));
  let hover = null;
  let theme = null;
  let asked = false;

  const time = (seconds) => `${plain(seconds / unit.seconds, 9)} ${unit.symbol}`;

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    theme = {};
    for (const name of ["ink", "quiet", "rule", "idle", "lane", "cursor", "curve", "curve-fill"]) {
      const key = name.replace("-f", "F");
      theme[key] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  // Round times within the view, and how to print them.
  function ticksFor(chart) {
    const count = Math.max(2, Math.floor((chart.right - chart.left) / (chart.narrow ? 64 : 96)));
    const rough = (view.to - view.from) / unit.seconds / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10, 20].find((factor) => power * factor >= rough * 0.9999);
    const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const ticks = [];
    const last = Math.floor(view.to / unit.seconds / step + 1e-6);
    for (let i = Math.ceil(view.from / unit.seconds / step - 1e-6); i <= last; i++) {
      const suffix = ticks.length ? "" : ` ${unit.symbol}`;
      ticks.push({ time: i * step * unit.seconds, label: (i * step).toFixed(decimals) + suffix });
    }
    return ticks;
  }

  function draw() {
    asked = false;
    readout.textContent =
      `${plain(view.from / unit.seconds, 6)} – ${plain(view.to / unit.seconds, 6)} ${unit.symbol}`;
    for (const chart of charts) {
      const box = chart.canvas.getBoundingClientRect();
      if (box.bottom < 0 || box.top > window.innerHeight) continue;
      const matching = hover && hover.schedule === chart.data.schedule;
      const mark = hover && (matching ? hover : { time: hover.time });
      chart.draw(view, theme, ticksFor(chart), mark);
    }
  }

  function ask() {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  }

  function resize() {
    const topPx = toolbar.offsetHeight;
    for (const chart of charts) chart.resize(topPx);
    ask();
  }

  function show(from, to) {
    const span = Math.min(Math.max(to - from, least), report.extent_s);
    const middle = (from + to) / 2;
    const begin = Math.min(middle - span / 2, report.extent_s - span);
    view.from = begin > report.extent_s * 1e-12 ? begin : 0; // rounding leaves no digits behind
    view.to = view.from + span;
    ask();
  }

  function zoom(factor, around = (view.from + view.to) / 2) {
    const span = Math.min(Math.max((view.to - view.from) * factor, least), report.extent_s);
    const share = (around - view.from) / (view.to - view.from);
    show(around - share * span, around + (1 - share) * span);
  }

  const pan = (seconds) => show(view.from + seconds, view.to + seconds);
  const reset = () => show(0, report.extent_s);

  // The tooltip: lines of [name, value], a heading where the value is null; text only.
  function fillTooltip(title, detail, lines) {
    const head = document.createElement("div");
    head.append(Object.assign(document.createElement("b"), { textContent: title }), ` ${detail}`);
    const list = document.createElement("dl");
    for (const [name, value] of lines) {
      const term = Object.assign(document.createElement("dt"), { textContent: name });
      term.classList.toggle("whole", value === null);
      list.append(term);
      if (value === null) continue;
      list.append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    tooltip.replaceChildren(head, list);
  }

  const times = (start, end) => [
    ["start", time(start)],
    ["end", time(end)],
    ["duration", time(end - start)],
  ];

  function describeSpan(chart, { lane, span, rank }) {
    const kind = report.kinds[lane.kind[span]];
    const [stage, microbatch] = [lane.stage[span], lane.microbatch[span]];
    const [start, end] = [lane.start[span], lane.end[span]];
    const lines = [["rank", rank], ["stage", stage], ["microbatch", microbatch], ...times(start, end)];
    const elsewhere = [];
    for (const other of charts) {
      if (other === chart || other.data.schedule !== chart.data.schedule) continue;
      const otherLane = lane === chart.compute ? other.compute : other.communication;
      const at = otherLane ? otherLane.find(stage, lane.kind[span], microbatch) : -1;
      if (at < 0) continue;
      const lasts = otherLane.end[at] - otherLane.start[at];
      const change = end > start ? ` (${signed((lasts / (end - start) - 1) * 100)} %)` : "";
      elsewhere.push([`in “${other.data.title}”`, null]);
      elsewhere.push(["start", time(otherLane.start[at])], ["duration", time(lasts) + change]);
    }
    return { title: `${stage}${kind.name}${microbatch}`, detail: kind.label, lines, elsewhere };
  }

  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(1);

  function describeIdle(chart, { rank, time: when }) {
    const lane = chart.compute;
    if (when < 0 || when > chart.data.end) return null;
    const next = lane.first(rank, when);
    const start = next > lane.offsets[rank] ? lane.end[next - 1] : 0;
    const end = next < lane.offsets[rank + 1] ? lane.start[next] : chart.data.end;
    return { title: "idle", detail: "", lines: [["rank", rank], ...times(start, end)], elsewhere: [] };
  }

  function describe(chart, found) {
    const { lane, span, curve, rank } = found;
    const value = chart.curves.length && curveValue(chart.curves[rank], found.time);
    const held = chart.curves.length
      ? [[chart.data.curve.name, amount(value, chart.data.curve.unit)]]
      : [];
    if (curve) {
      return { title: `rank ${rank}`, detail: `at ${time(found.time)}`, lines: held };
    }
    const known = span >= 0 ? describeSpan(chart, found) : null;
    const told = known ?? (lane === chart.compute ? describeIdle(chart, found) : null);
    return told && { ...told, lines: [...told.lines, ...held, ...told.elsewhere] };
  }

  function curveValue({ times: at, values }, when) {
    const index = firstAbove(at, when, 0, at.length) - 1;
    return index < 0 ? 0 : values[index];
  }

  function point(chart, event) {
    const box = chart.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  function inspect(chart, event) {
    const { x, y } = point(chart, event);
    const found = chart.locate(view, x, y);
    const told = found && describe(chart, found);
    hover = found && { schedule: chart.data.schedule, time: found.time };
    if (found && found.span >= 0) {
      hover.key = found.lane.key(found.span);
      hover.microbatch = found.lane.microbatch[found.span];
    }
    tooltip.hidden = !told;
    if (told) {
      fillTooltip(told.title, told.detail, told.lines);
      place(event.clientX, event.clientY);
    }
    ask();
  }

  function place(x, y) {
    const { offsetWidth: width, offsetHeight: height } = tooltip;
    const left = x + 16 + width > window.innerWidth ? x - 16 - width : x + 16;
    const top = y + 16 + height > window.innerHeight ? y - 16 - height : y + 16;
    tooltip.style.left = `${Math.max(4, Math.min(left, window.innerWidth - width - 4))}px`;
    tooltip.style.top = `${Math.max(4, top)}px`;
  }

  function leave() {
    hover = null;
    tooltip.hidden = true;
    ask();
  }

  function onWheel(chart, event) {
    const pixels = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const secondsPerPixel = (view.to - view.from) / (chart.right - chart.left);
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const amount = (sideways ? event.deltaX || event.deltaY : event.deltaY) * pixels;
    const whole = view.to - view.from >= report.extent_s * (1 - 1e-9);
    if (whole && (sideways || amount > 0)) return; // nothing to zoom out of: let the page scroll
    event.preventDefault();
    if (sideways) pan(amount * secondsPerPixel);
    else zoom(Math.exp(amount * 0.0016), chart.timeAt(view, point(chart, event).x));
    inspect(chart, event);
  }

  // One pointer drags; two pinch.
  function bindPointers(chart) {
    const down = new Map();
    let moved = 0;
    const element = chart.canvas;
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      element.setPointerCapture(event.pointerId);
      down.set(event.pointerId, { x: event.clientX, y: event.clientY });
      moved = 0;
    });
    element.addEventListener("pointermove", (event) => {
      const before = down.get(event.pointerId);
      if (!before) return inspect(chart, event);
      const after = { x: event.clientX, y: event.clientY };
      const secondsPerPixel = (view.to - view.from) / (chart.right - chart.left);
      moved += Math.abs(after.x - before.x) + Math.abs(after.y - before.y);
      down.set(event.pointerId, after);
      if (moved > 4) leave();
      if (down.size === 1) {
        pan((before.x - after.x) * secondsPerPixel);
        if (event.pointerType === "mouse") window.scrollBy(0, before.y - after.y);
      } else {
        const other = [...down].find(([id]) => id !== event.pointerId)[1];
        const middle = (after.x + other.x) / 2 - element.getBoundingClientRect().left;
        const ratio = Math.max(8, Math.abs(before.x - other.x)) / Math.max(8, Math.abs(after.x - other.x));
        zoom(ratio, chart.timeAt(view, middle));
      }
    });
    const up = (event) => {
      const tapped = down.delete(event.pointerId) && moved <= 4 && event.type === "pointerup";
      if (tapped) inspect(chart, event);
    };
    element.addEventListener("pointerup", up);
    element.addEventListener("pointercancel", up);
    element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
    element.addEventListener("wheel", (event) => onWheel(chart, event), { passive: false });
  }

  const KEYS = {
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: reset,
    Home: () => show(0, view.to - view.from),
    End: () => show(report.extent_s - (view.to - view.from), report.extent_s),
    ArrowLeft: () => pan((view.from - view.to) / 5),
    ArrowRight: () => pan((view.to - view.from) / 5),
    Escape: leave,
  };

  function onKey(event) {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  for (const chart of charts) {
    bindPointers(chart);
    chart.stage.addEventListener("keydown", onKey);
  }
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
  document.getElementById("zoom-reset").addEventListener("click", reset);
  window.addEventListener("resize", resize);
  window.addEventListener("scroll", ask, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    ask();
  });
  readTheme();
  resize();
  globalThis.fullboreReport = { charts, view }; // for the console, and for tests
})();
