// Parallel coordinates on a canvas: Plotly's own compile code at run time, which this page's security policy forbids.
// Drag along an axis to pick trials; a click on the axis forgets. What is picked is told, so that the table shows it.
import { el } from "./dom.js";

const TOP = 46, BOTTOM = 22, SIDE = 44, HEIGHT = 360;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class ParallelCoordinates {
  constructor(onPick) {
    this.onPick = onPick;
    this.ranges = new Map();
    this.data = null;
    this.canvas = el("canvas", { role: "img", "aria-label": "Parallel coordinates of the trials: an axis for each searched key, a line for each trial" });
    this.element = el("div", { class: "parallel", tabindex: "0", role: "region", "aria-label": "Parallel coordinates" }, this.canvas);
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", () => this.release());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(data) {
    const labels = (each) => each.axes.map((axis) => axis.label).join("\n");
    if (!this.data || labels(this.data) !== labels(data)) this.ranges.clear();
    this.data = data;
    this.bounds = data.axes.map((axis) => {
      let low = Infinity, high = -Infinity;
      for (const value of axis.values) { if (value < low) low = value; if (value > high) high = value; }
      return low === high ? [low - 0.5, high + 0.5] : [low, high];
    });
    this.draw();
    if (this.ranges.size) this.tell();
  }

  clear() { this.ranges.clear(); this.draw(); this.tell(); }

  x(axis) { return SIDE + axis * (this.width - 2 * SIDE) / Math.max(1, this.data.axes.length - 1); }

  y(axis, value) {
    const [low, high] = this.bounds[axis];
    return TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  }

  value(axis, y) {
    const [low, high] = this.bounds[axis];
    return low + (1 - (y - TOP) / (HEIGHT - TOP - BOTTOM)) * (high - low);
  }

  isPicked(i) {
    for (const [axis, [low, high]] of this.ranges) {
      const value = this.data.axes[axis].values[i];
      if (value < low || value > high) return false;
    }
    return true;
  }

  draw() {
    if (!this.data || !this.element.clientWidth) return;
    const { axes, scores } = this.data, ratio = devicePixelRatio || 1;
    this.width = Math.max(this.element.clientWidth, axes.length * 110);
    if (this.canvas.width !== Math.round(this.width * ratio)) { this.canvas.width = this.width * ratio; this.canvas.height = HEIGHT * ratio; }
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${HEIGHT}px`;
    const g = this.canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, this.width, HEIGHT);
    const order = scores.map((_, i) => i).sort((a, b) => scores[a] - scores[b]);  // the best above the others
    const colours = ["--scale-low", "--scale-middle", "--scale-high"].map(css).map(channels);
    const many = Math.max(0.15, Math.min(0.9, 60 / Math.sqrt(order.length + 1) / 6));
    order.forEach((i, place) => {
      const picked = this.isPicked(i), at = order.length > 1 ? place / (order.length - 1) : 1;
      g.strokeStyle = picked ? mixed(colours, at) : css("--line");
      g.globalAlpha = picked ? many + (1 - many) * at ** 4 : 0.25;
      g.lineWidth = picked && at > 0.97 ? 2 : 1.2;
      g.beginPath();
      axes.forEach((axis, k) => {
        const x = this.x(k), y = this.y(k, axis.values[i]);
        if (k === 0) { g.moveTo(x, y); return; }
        const from = this.x(k - 1), middle = (from + x) / 2;
        g.bezierCurveTo(middle, this.y(k - 1, axes[k - 1].values[i]), middle, y, x, y);
      });
      g.stroke();
    });
    g.globalAlpha = 1;
    axes.forEach((axis, k) => this.drawAxis(g, axis, k));
  }

  drawAxis(g, axis, k) {
    const x = this.x(k), range = this.ranges.get(k), bottom = HEIGHT - BOTTOM;
    g.strokeStyle = css("--faint");
    g.lineWidth = 1;
    g.beginPath(); g.moveTo(x, TOP); g.lineTo(x, bottom); g.stroke();
    if (range) {
      g.fillStyle = css("--accent");
      g.globalAlpha = 0.3;
      g.fillRect(x - 7, this.y(k, range[1]), 14, this.y(k, range[0]) - this.y(k, range[1]));
      g.globalAlpha = 1;
    }
    const isLast = k === this.data.axes.length - 1;
    g.textAlign = k === 0 ? "left" : isLast ? "right" : "center";
    g.font = `600 12px ${css("--font")}`;
    g.fillStyle = css("--ink");
    const space = (this.width - 2 * SIDE) / Math.max(1, this.data.axes.length - 1) - 10;
    g.fillText(short(g, axis.label, k === 0 || isLast ? space / 2 + SIDE : space), k === 0 ? 4 : isLast ? this.width - 4 : x, 16);
    g.font = `11px ${css("--font")}`;
    g.textAlign = isLast ? "right" : "left";
    const [low, high] = this.bounds[k];
    const ticks = axis.ticks || nice(low, high).map((value) => [value, text(value)]);
    for (const [value, name] of ticks) {
      if (value < low || value > high) continue;
      const y = this.y(k, value), label = short(g, name, 84), at = isLast ? x - 8 : x + 8;
      g.strokeStyle = css("--faint");
      g.beginPath(); g.moveTo(x - 3, y); g.lineTo(x + 3, y); g.stroke();
      g.lineWidth = 3; g.strokeStyle = css("--card"); g.lineJoin = "round"; g.strokeText(label, at, y + 4); g.lineWidth = 1;
      g.fillStyle = css("--soft");
      g.fillText(label, at, y + 4);
    }
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, Math.min(HEIGHT - BOTTOM, Math.max(TOP, event.clientY - box.top))];
  }

  press(event) {
    if (!this.data) return;
    const [x, y] = this.place(event);
    const axis = this.data.axes.findIndex((_, k) => Math.abs(this.x(k) - x) < 18);
    if (axis < 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { axis, from: y, moved: false };
  }

  move(event) {
    if (!this.drag) return;
    const [, y] = this.place(event);
    this.drag.moved ||= Math.abs(y - this.drag.from) > 3;
    if (!this.drag.moved) return;
    const ends = [this.value(this.drag.axis, y), this.value(this.drag.axis, this.drag.from)].sort((a, b) => a - b);
    this.ranges.set(this.drag.axis, ends);
    this.draw();
  }

  release() {
    if (!this.drag) return;
    if (!this.drag.moved) this.ranges.delete(this.drag.axis);
    this.drag = null;
    this.draw();
    this.tell();
  }

  tell() {
    this.onPick(this.ranges.size ? new Set(this.data.trials.filter((_, i) => this.isPicked(i))) : null);
  }
}

function channels(colour) { return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)); }

function mixed([low, middle, high], at) {
  const [a, b, t] = at < 0.5 ? [low, middle, at * 2] : [middle, high, at * 2 - 1];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * t)).join(",")})`;
}

// A key loses its leading sections before its letters.
function short(g, label, width) {
  const parts = label.split(".");
  while (parts.length > 1 && g.measureText(parts.join(".")).width > width) parts.shift();
  let kept = parts.join(".");
  while (kept.length > 3 && g.measureText(kept).width > width) kept = `…${kept.replace("…", "").slice(1)}`;
  return kept;
}

function nice(low, high) {
  const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(10));
  return found;
}

function text(value) { return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(4)); }
