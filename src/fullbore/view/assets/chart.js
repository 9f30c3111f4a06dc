// One panel's chart: decodes its spans and draws the part that is visible.
//
// A row a rank: compute bars on grey (idle), sends and receives on two thin lanes beneath, copies
// to the host on a third where there are any, then the memory curve. Only rows on screen are drawn; bars thinner than a pixel are merged into the
// mean of their colours, so that a hundred thousand spans stay fluid.
"use strict";

const ARRAYS = { f8: Float64Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
const AXIS_PX = 26;
const LANE_PX = 4;
const FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif';

function decode([type, text]) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new ARRAYS[type](bytes.buffer);
}

// The first index in [from, to) where values[index] > limit (values ascending).
function firstAbove(values, limit, from, to) {
  while (from < to) {
    const middle = (from + to) >>> 1;
    if (values[middle] > limit) to = middle;
    else from = middle + 1;
  }
  return from;
}

// Spans of one sort (compute, or communication and copies), by rank and start.
class Lane {
  constructor(data) {
    this.offsets = data.offsets;
    for (const name of ["kind", "stage", "microbatch", "chunk", "start", "end"]) {
      this[name] = decode(data[name]);
    }
    // reach[i]: the latest end among its rank's spans up to i; ascending, so it can be searched.
    this.reach = this.end.slice();
    for (let rank = 0; rank + 1 < this.offsets.length; rank++) {
      for (let i = this.offsets[rank] + 1; i < this.offsets[rank + 1]; i++) {
        this.reach[i] = Math.max(this.reach[i], this.reach[i - 1]);
      }
    }
    this.places = null;
  }

  // The first span of a rank that may last beyond a time.
  first(rank, time) {
    return firstAbove(this.reach, time, this.offsets[rank], this.offsets[rank + 1]);
  }

  // The span of a rank nearest to a time within a tolerance, of several the last started; or -1.
  at(rank, time, tolerance, accepts = () => true) {
    let best = -1;
    let distance = Infinity;
    for (let i = this.first(rank, time - tolerance); i < this.offsets[rank + 1]; i++) {
      if (this.start[i] > time + tolerance) break;
      const away = Math.max(this.start[i] - time, time - this.end[i], 0);
      if (away > tolerance || away > distance || !accepts(this.kind[i])) continue;
      best = i;
      distance = away;
    }
    return best;
  }

  // Where an action stands, or -1.
  find(stage, kind, microbatch) {
    if (!this.places) {
      this.places = new Map();
      for (let i = 0; i < this.kind.length; i++) this.places.set(this.key(i), i);
    }
    return this.places.get(`${stage}/${kind}/${microbatch}`) ?? -1;
  }

  key(i) {
    return `${this.stage[i]}/${this.kind[i]}/${this.microbatch[i]}`;
  }
}

class Chart {
  constructor(data, stage, kinds) {
    this.data = data;
    this.stage = stage;
    this.kinds = kinds;
    this.canvas = stage.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.compute = new Lane(data.compute);
    this.communication = data.communication && new Lane(data.communication);
    this.curves = data.curves.map((curve) => ({
      times: decode(curve.times),
      values: decode(curve.values),
      peak: curve.peak,
    }));
    this.peak = this.curves.reduce((most, curve) => Math.max(most, curve.peak), 0);
    this.parts = data.colors.map((shades) => shades.map(parts));
  }

  // Sizes for the width of the page; the canvas is never higher than the window.
  resize(topPx) {
    const ranks = this.data.ranks;
    const size = ranks <= 16 ? 0 : ranks <= 64 ? 1 : 2;
    this.narrow = this.stage.clientWidth < 640;
    this.left = this.narrow ? 58 : 104;
    this.width = this.stage.clientWidth;
    this.right = this.width - (this.narrow ? 8 : 16);
    this.barPx = [26, 17, 10][size];
    this.lanesPx = this.communication ? this.data.lanes * LANE_PX + 2 : 0;
    this.curvePx = this.curves.length ? [24, 14, 9][size] : 0;
    this.rowPx = this.barPx + this.lanesPx + this.curvePx + (size ? 4 : 10);
    this.total = AXIS_PX + ranks * this.rowPx + 4;
    this.height = Math.min(this.total, Math.max(160, window.innerHeight - topPx));
    this.topPx = topPx;
    this.stage.style.height = `${this.total}px`;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas.style, { height: `${this.height}px`, top: `${topPx}px` });
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ratio = ratio;
    this.crumbs = [0, 1, 2].map(() => new Crumbs(Math.ceil((this.right - this.left) * ratio)));
    this.scroll();
  }

  // How far the rows have moved up under the canvas, which sticks to the toolbar.
  scroll() {
    const above = this.topPx - this.stage.getBoundingClientRect().top;
    this.offset = Math.min(Math.max(0, above), this.total - this.height);
  }

  rowTop(rank) {
    return AXIS_PX + rank * this.rowPx - this.offset;
  }

  timeAt(view, x) {
    return view.from + ((x - this.left) / (this.right - this.left)) * (view.to - view.from);
  }

  xOf(view, time) {
    return this.left + ((time - view.from) / (view.to - view.from)) * (this.right - this.left);
  }

  // What lies at a point of the canvas: rank, lane, and the span there (-1: none).
  locate(view, x, y) {
    this.scroll();
    const rank = Math.floor((y + this.offset - AXIS_PX) / this.rowPx);
    if (y < AXIS_PX || x < this.left || x > this.right) return null;
    if (rank < 0 || rank >= this.data.ranks) return null;
    const time = this.timeAt(view, x);
    const pixel = (view.to - view.from) / (this.right - this.left);
    const within = y - this.rowTop(rank);
    const found = { rank, time, lane: this.compute, span: -1, curve: false };
    if (within < this.barPx) found.span = this.compute.at(rank, time, 0.5 * pixel);
    else if (within < this.barPx + this.lanesPx) {
      const below = Math.floor((within - this.barPx - 1) / LANE_PX);
      const thin = Math.min(Math.max(below, 0), this.data.lanes - 1);
      const accepts = (kind) => this.kinds[kind].lane === thin;
      found.lane = this.communication;
      found.span = this.communication.at(rank, time, 2 * pixel, accepts);
    } else found.curve = true;
    return found;
  }

  draw(view, theme, ticks, hover) {
    this.scroll();
    const context = this.context;
    context.clearRect(0, 0, this.width, this.height);
    this.drawTicks(view, theme, ticks);
    context.save();
    context.beginPath();
    context.rect(0, AXIS_PX, this.width, this.height - AXIS_PX);
    context.clip();
    const first = Math.max(0, Math.floor(this.offset / this.rowPx));
    const last = Math.ceil((this.offset + this.height - AXIS_PX) / this.rowPx);
    for (let rank = first; rank < Math.min(last, this.data.ranks); rank++) {
      this.drawRank(view, theme, rank, hover);
    }
    context.restore();
    if (hover && hover.time >= view.from && hover.time <= view.to) {
      context.fillStyle = theme.cursor;
      context.fillRect(Math.round(this.xOf(view, hover.time)), AXIS_PX, 1, this.height);
    }
  }

  drawTicks(view, theme, ticks) {
    const context = this.context;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const tick of ticks) {
      const x = Math.round(this.xOf(view, tick.time));
      context.fillStyle = theme.rule;
      context.fillRect(x, AXIS_PX - 6, 1, this.height);
      const half = context.measureText(tick.label).width / 2;
      context.fillStyle = theme.quiet;
      context.fillText(tick.label, Math.min(x, this.width - half - 1), 10);
    }
  }

  drawRank(view, theme, rank, hover) {
    const context = this.context;
    const top = this.rowTop(rank);
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = theme.ink;
    context.font = `${this.barPx < 14 ? 9 : 12}px ${FONT}`;
    context.fillText(`rank ${rank}`, this.left - 10, top + this.barPx / 2 + 0.5);
    context.save();
    context.beginPath();
    context.rect(this.left, top - 2, this.right - this.left, this.rowPx);
    context.clip();
    this.fill(view, 0, this.data.end, top, this.barPx, theme.idle);
    this.drawSpans(view, theme, this.compute, rank, [top], this.barPx, hover);
    if (this.communication) {
      const lane = top + this.barPx + 1;
      this.fill(view, 0, this.data.end, lane, this.data.lanes * LANE_PX, theme.lane);
      const tops = [lane, lane + LANE_PX, lane + 2 * LANE_PX];
      this.drawSpans(view, theme, this.communication, rank, tops, LANE_PX, hover);
    }
    if (this.curvePx) this.drawCurve(view, theme, rank, top + this.barPx + this.lanesPx + 2);
    context.restore();
    if (this.curvePx >= 14) this.drawPeak(theme, rank, top + this.barPx + this.lanesPx);
  }

  fill(view, from, to, top, height, color) {
    const left = Math.max(this.left, this.xOf(view, from));
    const right = Math.min(this.right, this.xOf(view, to));
    this.context.fillStyle = color;
    if (right > left) this.context.fillRect(left, top, right - left, height);
  }

  // The spans of a rank, those of the thin lane i at tops[i].
  drawSpans(view, theme, lane, rank, tops, height, hover) {
    const context = this.context;
    const scale = (this.right - this.left) / (view.to - view.from);
    const labelled = lane === this.compute && height >= 14;
    const outlined = [];
    const stop = lane.offsets[rank + 1];
    for (let i = lane.first(rank, view.from); i < stop && lane.start[i] < view.to; i++) {
      const kind = lane.kind[i];
      const start = (lane.start[i] - view.from) * scale;
      const end = (lane.end[i] - view.from) * scale;
      const thin = this.kinds[kind].lane;
      if (end - start < 1) {
        const seen = this.parts[kind][lane.chunk[i]];
        this.crumbs[thin].add(start * this.ratio, end * this.ratio, seen);
        continue;
      }
      const left = this.left + Math.max(start, -4);
      const right = Math.min(this.left + end, this.right + 4);
      const width = right - left - (end - start > 4 ? 1 : 0);
      context.fillStyle = this.data.colors[kind][lane.chunk[i]];
      context.fillRect(left, tops[thin], width, height);
      if (labelled) this.drawLabel(lane, i, left, width, tops[0]);
      const same = hover && hover.microbatch === lane.microbatch[i];
      if (same && end - start > 3) outlined.push([i, left, tops[thin], width]);
    }
    this.crumbs.forEach((crumbs, i) => crumbs.paint(context, this.left, tops[i], height, this.ratio));
    for (const [i, left, top, width] of outlined) {
      context.strokeStyle = theme.ink;
      context.lineWidth = hover.key === lane.key(i) ? 3 : 1;
      context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
    }
  }

  drawLabel(lane, i, left, width, top) {
    const context = this.context;
    const short = String(lane.microbatch[i]);
    const whole = `${lane.stage[i]}${this.kinds[lane.kind[i]].name}${short}`;
    const text = width > 72 ? whole : short;
    if (width < 6.6 * text.length + 4) return;
    context.font = `${this.barPx > 20 ? 12 : 10}px ${FONT}`;
    context.textAlign = "center";
    context.fillStyle = this.data.inks[lane.kind[i]][lane.chunk[i]];
    const from = Math.max(left, this.left);
    const to = Math.min(left + width, this.right);
    context.fillText(text, (from + to) / 2, top + this.barPx / 2 + 0.5);
  }

  drawCurve(view, theme, rank, top) {
    const { times, values } = this.curves[rank];
    const context = this.context;
    const bottom = top + this.curvePx - 2;
    const level = (value) => bottom - (this.peak > 0 ? value / this.peak : 0) * (this.curvePx - 4);
    let i = Math.max(0, firstAbove(times, view.from, 0, times.length) - 1);
    const end = Math.min(this.right + 2, this.xOf(view, this.data.end));
    let x = Math.max(this.left - 2, this.xOf(view, times.length ? times[i] : 0));
    const line = new Path2D();
    line.moveTo(x, bottom);
    while (i < times.length && times[i] < view.to) {
      let high = values[i]; // of the steps within one pixel: the highest, then the last
      while (i + 1 < times.length && this.xOf(view, times[i + 1]) < x + 1) {
        high = Math.max(high, values[++i]);
      }
      line.lineTo(x, level(high));
      line.lineTo(x, level(values[i]));
      i += 1;
      x = Math.min(end, i < times.length ? this.xOf(view, times[i]) : end);
      line.lineTo(x, level(values[i - 1]));
    }
    context.strokeStyle = theme.curve;
    context.lineWidth = 1.25;
    context.stroke(line);
    line.lineTo(x, bottom);
    context.fillStyle = theme.curveFill;
    context.fill(line);
  }

  drawPeak(theme, rank, top) {
    const context = this.context;
    const text = amount(this.curves[rank].peak, this.data.curve.unit);
    context.font = `${this.narrow ? 10 : 11}px ${FONT}`;
    context.textAlign = "right";
    context.fillStyle = theme.quiet;
    context.fillText(this.narrow ? text : `peak ${text}`, this.left - 10, top + this.curvePx / 2);
  }
}

// Bars thinner than a pixel, gathered: each device pixel gets their mean colour, as faint as it
// is empty. The row is painted as one picture, one pixel high.
class Crumbs {
  constructor(columns) {
    this.sums = new Float64Array(4 * Math.max(1, columns)); // red, green, blue, filled
    this.canvas = document.createElement("canvas");
    this.canvas.width = Math.max(1, columns);
    this.canvas.height = 1;
    this.context = this.canvas.getContext("2d");
    this.used = false;
  }

  add(start, end, [red, green, blue]) {
    const column = Math.floor((start + end) / 2);
    if (column < 0 || column >= this.canvas.width) return;
    const weight = Math.max(end - start, 0.1);
    const at = 4 * column;
    this.sums[at] += red * weight;
    this.sums[at + 1] += green * weight;
    this.sums[at + 2] += blue * weight;
    this.sums[at + 3] += weight;
    this.used = true;
  }

  paint(context, left, top, height, ratio) {
    if (!this.used) return;
    const sums = this.sums;
    const image = this.context.createImageData(this.canvas.width, 1);
    for (let at = 0; at < sums.length; at += 4) {
      const filled = sums[at + 3];
      if (filled === 0) continue;
      for (let part = 0; part < 3; part++) image.data[at + part] = sums[at + part] / filled;
      image.data[at + 3] = 255 * Math.min(1, Math.max(0.2, filled));
    }
    this.context.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, left, top, this.canvas.width / ratio, height);
    sums.fill(0);
    this.used = false;
  }
}

// Red, green and blue of "#rrggbb".
const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

// A number to so many significant digits, without exponent and trailing zeros.
function plain(value, digits) {
  if (value === 0) return "0";
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  const text = value.toFixed(Math.min(decimals, 20));
  const short = text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  return short === "-0" ? "0" : short;
}

// A curve's value with its unit: bytes in the binary unit that suits, else the number.
function amount(value, unit) {
  if (unit !== "bytes") return plain(value, 4);
  for (const [symbol, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= size) return `${plain(value / size, 4)} ${symbol}`;
  }
  return `${plain(value, 4)} B`;
}
