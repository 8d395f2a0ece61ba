// The batches as they happen: a stream of server-sent events, read by hand as it may need a token.
import { setConnection } from "./page.js";

const KEPT = 240, SHOWN = 120, RECENT_S = 5, AGAIN_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";

export class Batches {
  constructor($, headers) {
    this.$ = $;
    this.headers = headers;
    this.batches = [];
    setInterval(() => this.showRate(), 1000);
  }

  async follow() {
    for (;;) {
      try { await this.read(); } catch { /* the connection broke */ }
      setConnection("is-lost", "not connected");
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }

  async read() {
    const answer = await fetch("live", { headers: this.headers() });
    if (!answer.ok) throw new Error(String(answer.status));
    setConnection("is-live", "live");
    this.batches = [];
    let text = "";
    for await (const chunk of chunks(answer.body.pipeThrough(new TextDecoderStream()))) {
      const events = (text + chunk).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) this.add(JSON.parse(data.slice(6)));
      }
    }
  }

  add({ batches, shed, time_s: now }) {
    this.offset = now - Date.now() / 1000;
    this.batches = [...this.batches, ...batches].slice(-KEPT);
    this.$("shed").textContent = shed.toLocaleString("en");
    this.$("no-batches").hidden = this.batches.length > 0;
    this.showTiles();
    this.showCharts();
  }

  showTiles() {
    const last = this.batches.slice(-100), requests = sum(last, "size");
    if (!requests) return;
    const weighted = last.reduce((total, batch) => total + batch.latency_ms * batch.size, 0) / requests;
    const slowest = Math.max(...last.map((batch) => batch.latency_ms));
    this.$("size").textContent = (requests / last.length).toFixed(requests / last.length < 10 ? 1 : 0);
    this.$("latency").textContent = ms(weighted);
    this.$("tail").textContent = ms(slowest);
    this.$("wait").textContent = ms(last.at(-1).wait_ms);
    this.showRate();
  }

  showRate() {
    if (!this.batches.length) return;
    const from = Date.now() / 1000 + this.offset - RECENT_S;
    const recent = this.batches.filter((batch) => batch.time_s >= from);
    // Of a busy endpoint fewer seconds are remembered than are asked for.
    const full = recent.length === this.batches.length && recent.length >= KEPT;
    const span = full ? Math.max(0.05, recent.at(-1).time_s - recent[0].time_s) : RECENT_S;
    const rate = sum(recent, "size") / span;
    this.$("rate").textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  }

  showCharts() {
    const shown = this.batches.slice(-SHOWN);
    const most = Math.max(1, ...shown.map((batch) => batch.size));
    columns(this.$("sizes"), shown, most, (batch) => [[batch.size, `size${batch.failed ? " is-failed" : ""}`]]);
    const longest = Math.max(1e-3, ...shown.map((batch) => batch.latency_ms));
    columns(this.$("latencies"), shown, longest, (batch) => [[batch.service_ms, "service"], [batch.queue_ms, "queue"]]);
    label(this.$("sizes"), `up to ${most}`);
    label(this.$("latencies"), `up to ${ms(longest)}`);
  }
}

async function* chunks(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

function columns(svg, batches, most, parts) {
  svg.setAttribute("viewBox", `0 0 ${SHOWN} 100`);
  const start = SHOWN - batches.length, drawn = [];
  batches.forEach((batch, index) => {
    let below = 0;
    for (const [value, className] of parts(batch)) {
      const height = (value / most) * 100, rect = document.createElementNS(SVG, "rect");
      const place = { x: start + index + 0.1, y: 100 - below - height, width: 0.8, height, class: className };
      for (const [name, text] of Object.entries(place)) rect.setAttribute(name, text);
      drawn.push(rect);
      below += height;
    }
  });
  svg.replaceChildren(...drawn);
}

function label(svg, text) {
  const caption = svg.closest("figure").querySelector("figcaption");
  let output = caption.querySelector("output");
  if (!output) caption.append(output = document.createElement("output"));
  output.textContent = text;
}

const sum = (batches, key) => batches.reduce((total, batch) => total + batch[key], 0);
const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ms`;
