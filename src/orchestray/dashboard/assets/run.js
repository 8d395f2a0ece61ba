// One run: its curves, its workers, what happened, its config.
import { bytes, copyButton, duration, el, number, problems, progressBar, section, setText, statusMark, tile } from "./dom.js";
import { curve, histogram } from "./charts.js";
import { ask, follow } from "./live.js";
import { DataTable } from "./table.js";

const MAX_POINTS = 4000;  // of a curve; then the server is asked for a thinner one
const MAX_EVENTS = 500;
const ORDER = ["loss", "accuracy", "lr", "samples_per_s", "staleness", "bytes_sent", "bubble", "grad_norm"];

export function runPage(page, name, missing) {
  const state = { points: {}, events: [], charts: new Map(), isLog: false, isSmooth: true, config: "", staleness: [] };
  const view = build(page, name, state);
  const draw = frame(view.about, () => drawCharts(view, state));
  view.log.addEventListener("change", () => { state.isLog = view.log.checked; draw(); });
  view.smooth.addEventListener("change", () => { state.isSmooth = view.smooth.checked; draw(); });

  function whole(all) {
    state.points = all.points;
    state.events = all.events;
    state.staleness = all.staleness;
    state.config = all.config || "";
    setText(view.path, all.path);
    setText(view.config, all.config || "There is no config.yaml (yet).");
    view.tensorboard.textContent = `tensorboard --logdir ${quoted(`${all.path}/tensorboard`)}`;
    showHead(view, all.head);
    view.workers.setRows(all.workers);
    showWorkers(view, all.workers);
    showEvents(view, state.events);
    draw();
  }

  let isAsking = false;
  const stop = follow(`?run=${encodeURIComponent(name)}`, {
    snapshot: whole,
    async change(news) {
      if (news.reset) { whole(news.reset); return; }
      if (news.head) showHead(view, news.head);
      if (news.config !== undefined) { state.config = news.config || ""; setText(view.config, state.config || "There is no config.yaml (yet)."); }
      if (news.workers) showWorkers(view, news.workers);
      if (news.events) { state.events = [...state.events, ...news.events].slice(-MAX_EVENTS); showEvents(view, state.events); }
      if (news.staleness) state.staleness = news.staleness;
      if (news.points && append(state.points, news.points) > MAX_POINTS && !isAsking) {
        isAsking = true;
        try { whole(await ask("/api/run", { name })); } finally { isAsking = false; }
      }
      draw();
    },
    missing,
  });
  return { leave: stop, redraw: draw };
}

// At most one drawing a frame, however many messages come, and none when the page is left.
export function frame(element, draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; if (window.Plotly && element.isConnected) draw(); });
  };
}

function append(points, fresh) {
  let most = 0;
  for (const [split, each] of Object.entries(fresh)) {
    for (const [key, { x, y }] of Object.entries(each)) {
      const known = ((points[split] ||= {})[key] ||= { x: [], y: [] });
      known.x.push(...x);
      known.y.push(...y);
      most = Math.max(most, known.x.length);
    }
  }
  return most;
}

function build(page, name, state) {
  const view = { status: el("span"), about: el("p", { class: "soft summary", text: " " }), path: el("code"), bar: progressBar("progress"),
                 config: el("pre", { class: "config", tabindex: "0" }), tensorboard: el("code"), problems: el("div"), error: el("p", { class: "error", hidden: true }) };
  view.tiles = Object.fromEntries(["step", "loss", "metric", "speed", "time", "sent"].map((key) => [key, tile(key)]));
  view.tiles.step.element.append(view.bar.element);
  view.log = el("input", { type: "checkbox" });
  view.smooth = el("input", { type: "checkbox", checked: true });
  view.grid = el("div", { class: "grid charts" });
  view.noCurves = el("p", { class: "empty-line", text: "No steps yet: curves appear with the first line of metrics.jsonl." });
  view.workers = new DataTable({ label: "Workers", rowKey: (row) => `${row.role} ${row.rank}`, columns: workerColumns([]), empty: "No processes known: actors.json is empty and nothing tells of workers." });
  view.events = el("ol", { class: "events", reversed: true });
  view.staleness = el("div", { id: "staleness", class: "chart" });
  view.stalenessSection = section("Staleness of updates", { hint: "How many updates were made to weights by others between a worker's read and its write." }, view.staleness);
  view.stalenessSection.hidden = true;
  view.ray = el("p", { class: "hint" });
  view.board = el("p", { class: "hint", hidden: true });

  page.append(
    el("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, el("a", { href: "#/", text: "All runs and searches" }),
      name.endsWith("/best") ? [" / ", el("a", { href: `#/search/${encodeURIComponent(name.slice(0, -5))}`, text: name.slice(0, -5) })] : null),
    el("header", { class: "title" }, el("h1", { text: name }), view.status), view.about, view.error, view.problems,
    el("div", { class: "tiles six" }, Object.values(view.tiles).map((each) => each.element)),
    el("div", { class: "switches" }, el("label", {}, view.smooth, " smooth the training curves"), el("label", {}, view.log, " logarithmic")),
    view.grid, view.noCurves,
    el("div", { class: "grid" },
      section("Workers", { wide: true, id: "workers" }, view.workers.element), view.stalenessSection,
      section("Events", { id: "events" }, el("div", { class: "scroll short", tabindex: "0", role: "region", "aria-label": "Events" }, view.events)),
      section("Elsewhere", {}, el("p", { class: "hint", text: "TensorBoard shows the same curves:" }),
        el("div", { class: "command" }, view.tensorboard, copyButton("the TensorBoard command", () => view.tensorboard.textContent)), view.board,
        el("p", { class: "hint", text: "The directory of the run:" }), el("div", { class: "command" }, view.path, copyButton("the directory", () => view.path.textContent)), view.ray)),
    el("section", { class: "wide" }, el("div", { class: "section-head" }, el("h2", { text: "Config" }), copyButton("the config", () => state.config)), view.config));
  linkElsewhere(view.board, view.ray);
  return view;
}

// What other pages show: a TensorBoard that runs, and the dashboard of the Ray cluster, where their addresses are known.
export async function linkElsewhere(board, ray) {
  const about = await ask("/api/about");
  const link = (href, text) => el("a", { href, rel: "noreferrer", target: "_blank", text });
  board.hidden = !isAddress(about.tensorboard);
  if (!board.hidden) board.replaceChildren(link(about.tensorboard, "TensorBoard"), " that is running.");
  if (isAddress(about.ray_dashboard)) {
    ray.replaceChildren(link(about.ray_dashboard, "Ray dashboard"), " of the cluster: processes, logs, memory.");
  } else {
    ray.textContent = "The Ray that a run starts for itself has no dashboard; on a cluster of yours, start this page with --ray-dashboard URL to link to its.";
  }
}

const isAddress = (text) => /^https?:\/\//.test(text || "");

function showHead(view, head) {
  view.status.replaceChildren(statusMark(head.status));
  const network = head.network || {};
  const degrees = ["data", "tensor", "pipeline"].filter((key) => (network[key] || 1) > 1).map((key) => `${network[key]} × ${key}`);
  setText(view.about, [head.task, head.exchange && head.exchange.replaceAll("_", " "), degrees.join(", ")].filter(Boolean).map((text) => String(text).split(":").pop()).join(" · ") || " ");
  const [metric, value] = Object.entries(head.validation).find(([key]) => key !== "loss") || Object.entries(head.validation)[0] || ["metric", null];
  view.tiles.step.set(`${number(head.step)}${head.total_steps ? ` / ${number(head.total_steps)}` : ""}`, head.epoch ? `steps, epoch ${head.epoch}` : "steps");
  view.bar.set(head.step, head.total_steps);
  view.tiles.loss.set(number(head.loss), "training loss");
  view.tiles.metric.set(number(value), `validation ${metric}`);
  view.tiles.speed.set(number(head.samples_per_s && Math.round(head.samples_per_s)), "samples/s");
  const goodput = typeof head.goodput === "number" ? `, goodput ${(100 * head.goodput).toFixed(1)} %` : "";
  view.tiles.time.set(duration(head.seconds), head.restarts ? `time, ${head.restarts} restart${head.restarts > 1 ? "s" : ""}${goodput}` : "time");
  const { sent, dense } = head.bytes || {};
  view.tiles.sent.set(bytes(sent), sent && dense && dense > sent * 1.01 ? `sent; ${(dense / sent).toFixed(1)} × less than dense` : "sent");
  view.error.hidden = !head.error;
  setText(view.error, head.error || "");
  view.problems.replaceChildren(...(head.problems.length ? [problems(head.problems)] : []));
}

function workerColumns(rows) {
  const has = (key) => rows.some((row) => row[key] !== null && row[key] !== undefined);
  const plain = (key, label, show = number, more = {}) => ({ key, label, numeric: true, value: (row) => row[key], cell: (row, td) => setText(td, show(row[key])), ...more });
  const columns = [
    { key: "role", label: "Role", value: (row) => row.role, cell: (row, td) => setText(td, row.role.replaceAll("_", " ")) },
    plain("rank", "Rank"),
    { key: "state", label: "State", value: (row) => (row.is_live ? "live" : "ended"), cell: (row, td) => td.replaceChildren(el("span", { class: `status ${row.is_live ? "running" : ""}`, text: row.is_live ? "live" : "ended" })) },
  ];
  if (has("node")) columns.push({ key: "node", label: "Node", minor: true, value: (row) => row.node, cell: (row, td) => setText(td, row.node || "–") });
  if (has("pid")) columns.push(plain("pid", "Process", (value) => (value ? String(value) : "–"), { minor: true }));
  const known = { shares: ["Shares", number], busy_s: ["Computed", duration], waited_s: ["Waited", duration], bytes_sent: ["Sent", bytes], peak_bytes: ["Peak memory", bytes] };
  for (const [key, [label, show]] of Object.entries(known)) if (has(key)) columns.push(plain(key, label, show));
  const listed = new Set(["role", "rank", "node", "pid", "is_live", ...Object.keys(known)]);
  for (const key of new Set(rows.flatMap(Object.keys))) if (!listed.has(key) && has(key)) columns.push(plain(key, key.replaceAll("_", " ")));
  return columns;
}

function showWorkers(view, rows) {
  const columns = workerColumns(rows);
  if (columns.map((each) => each.key).join() !== view.workers.columns.map((each) => each.key).join()) view.workers.setColumns(columns);
  view.workers.setRows(rows);
}

function showEvents(view, events) {
  if (!events.length) { view.events.replaceChildren(el("li", { class: "soft", text: "Nothing has happened yet." })); return; }
  view.events.replaceChildren(...[...events].reverse().map((event) => {
    const { event: what, time_s: time, role, rank, ...more } = event;
    const told = Object.entries(more).filter(([, value]) => value !== null).map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : number(value)}`);
    const bad = /lost|fail|killed|error/.test(what);
    return el("li", {}, el("span", { class: "time", text: duration(time) }), el("b", { class: bad ? "bad" : "", text: String(what).replaceAll("_", " ") }),
      role ? ` ${role.replaceAll("_", " ")} ${rank ?? ""}` : "", el("span", { class: "soft", text: told.length ? ` ${told.join(", ")}` : "" }));
  }));
}

function drawCharts(view, state) {
  const keys = new Set(Object.values(state.points).flatMap(Object.keys));
  const place = (key) => (ORDER.indexOf(key) + 1 || ORDER.length + 1);
  const sorted = [...keys].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  view.noCurves.hidden = sorted.length > 0;
  for (const key of sorted) {
    if (!state.charts.has(key)) {
      const chart = el("div", { id: `curve-${key}`, class: "chart", role: "img", "aria-label": `${key} over the steps` });
      state.charts.set(key, { chart, section: section(key.replaceAll("_", " "), {}, chart) });
    }
  }
  const sections = sorted.map((key) => state.charts.get(key).section);
  if (sections.some((each, i) => view.grid.children[i] !== each) || sections.length !== view.grid.children.length) view.grid.replaceChildren(...sections);
  for (const key of sorted) {
    const series = {};
    for (const split of ["train", "validation"]) if (state.points[split]?.[key]) series[split] = state.points[split][key];
    for (const [split, each] of Object.entries(state.points)) if (each[key]) series[split] ||= each[key];
    curve(state.charts.get(key).chart, key, series, { isLog: state.isLog, isSmooth: state.isSmooth });
  }
  view.stalenessSection.hidden = !state.staleness.length;
  if (state.staleness.length) histogram(view.staleness, state.staleness);
}

export const quoted = (path) => (/^[\w./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);
