// What the planner predicted for each run, beside what its steps took.
import { agreement } from "./charts.js";
import { el, hash, setText } from "./dom.js";
import { follow } from "./live.js";
import { DataTable } from "./table.js";

const ms = (seconds) => `${+(1000 * seconds).toPrecision(3)} ms`;
const percent = (part) => `${part > 0 ? "+" : ""}${(100 * part).toFixed(1)} %`;

export function predictionsPage(page) {
  const chart = el("div", { class: "chart tall", role: "img", "aria-label": "Predicted and measured seconds of a step of each run" });
  const table = new DataTable({ label: "Predictions", rowKey: (row) => row.name, sort: { key: "error", isUp: false }, columns: columns() });
  const summary = el("p", { class: "soft summary", text: " " });
  const empty = el("p", { class: "empty-line", hidden: true, text: "No run here was predicted: calibrate this machine (orchestray calibrate), plan a config (orchestray plan), and train it." });
  const shown = el("div", { class: "grid" }, el("section", { class: "wide" }, chart), el("section", { class: "wide list" }, table.element));
  page.append(el("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, el("a", { href: "#/", text: "All runs and searches" })),
    el("header", {}, el("h1", { text: "Predictions" }), summary), empty, shown);
  let rows = [];
  let isLeft = false;
  const draw = () => { if (rows.length && window.Plotly && !isLeft) agreement(chart, rows); };
  const ask = () => fetch("/api/predictions").then((response) => response.json()).then((found) => {
    if (isLeft) return;
    rows = found;
    table.setRows(rows);
    shown.hidden = !rows.length;
    empty.hidden = rows.length > 0;
    if (rows.length) {
      const sizes = rows.map((row) => Math.abs(row.error)).sort((a, b) => a - b);
      const held = rows.filter((row) => row.interval_s), inside = held.filter((row) => row.interval_s[0] <= row.measured_s && row.measured_s <= row.interval_s[1]);
      setText(summary, `${rows.length} runs; median error ${(100 * sizes[sizes.length >> 1]).toFixed(1)} %, largest ${(100 * sizes.at(-1)).toFixed(1)} %; ` +
        `within the 80 % interval: ${inside.length} of ${held.length}`);
    }
    draw();
  });
  const stop = follow("", { snapshot: ask, change: ask, missing() {} });
  return { leave() { isLeft = true; stop(); }, redraw: draw };
}

function columns() {
  const plain = (text) => (row, td) => setText(td, text(row));
  return [
    { key: "name", label: "Run", value: (row) => `${row.name} ${row.scheme}`, cell(row, td) {
      if (!td.firstChild) td.append(el("a", { href: hash("run", row.name), text: row.name }), el("span", { class: "about" }));
      setText(td.lastChild, row.scheme);
    } },
    { key: "predicted", label: "Predicted step", numeric: true, value: (row) => row.predicted_s, cell: plain((row) => ms(row.predicted_s)) },
    { key: "interval", label: "80 % interval", numeric: true, minor: true, value: (row) => row.interval_s?.[0], cell: plain((row) => (row.interval_s ? row.interval_s.map(ms).join(" to ") : "–")) },
    { key: "measured", label: "Measured step", numeric: true, value: (row) => row.measured_s, cell: plain((row) => ms(row.measured_s)) },
    { key: "error", label: "Error", numeric: true, value: (row) => Math.abs(row.error), cell: plain((row) => percent(row.error)) },
  ];
}
