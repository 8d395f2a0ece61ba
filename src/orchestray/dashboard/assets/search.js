// One search: what it found, how it got there, every trial.
import { copyButton, duration, el, hash, number, problems, progressBar, section, setText, statusMark, tile } from "./dom.js";
import { ask, follow } from "./live.js";
import { ParallelCoordinates } from "./parallel.js";
import { frame, quoted, linkElsewhere } from "./run.js";
import { DataTable, filterBox } from "./table.js";
import { family, openTrial } from "./trial.js";

const FIGURES_MS = 1500, IMPORTANCE_MS = 8000;

export function searchPage(page, name, missing) {
  const state = { head: null, rows: [], running: [], columns: [], figures: null, importance: null, picked: null };
  const view = build(page, name, state);
  const draw = frame(view.about, () => drawFigures(view, state, name));
  const figures = atMostEvery(FIGURES_MS, async () => { state.figures = await ask("/api/search/figures", { name }); draw(); });
  const importance = atMostEvery(IMPORTANCE_MS, async () => { state.importance = (await ask("/api/search/importance", { name })).importance; draw(); });
  const descent = atMostEvery(FIGURES_MS, async () => {
    if (!state.head.architecture || state.head.best_trial === null || state.head.best_trial === undefined) return;
    const found = await ask("/api/search/trial", { name, trial: state.head.best_trial });
    const drawn = JSON.stringify(found.ancestors);
    if (view.family.dataset.drawn !== String(drawn.length) + state.head.best_trial) {
      view.family.dataset.drawn = String(drawn.length) + state.head.best_trial;
      family(view.family, found, (trial) => openTrial(name, trial));
      view.family.scrollLeft = view.family.scrollWidth; // the best one is the last, and what a narrow page shows first
    }
  });

  function take(news) {
    if (news.table.is_whole) { state.rows = news.table.rows; state.columns = news.table.columns; } else state.rows = [...state.rows, ...news.table.rows];
    state.running = news.running;
    const isNew = !state.head || state.head.revision !== news.head.revision;
    state.head = news.head;
    showHead(view, state, name);
    showTable(view, state, name);
    if (isNew) { figures(); descent(); importance(); }
  }

  const stop = follow(`?search=${encodeURIComponent(name)}`, {
    snapshot(all) {
      setText(view.path, all.path);
      view.tensorboard.textContent = `tensorboard --logdir ${quoted(`${all.path}/tensorboard`)}`;
      view.report.hidden = !all.has_report;
      setText(view.config, all.config || "There is no config.yaml (yet).");
      take(all);
    },
    change: take,
    missing,
  });
  return { leave() { stop(); figures.stop(); importance.stop(); descent.stop(); }, redraw: draw };
}

// Calls at once, then at most every so many milliseconds, and a last time for the last of the calls.
function atMostEvery(ms, work) {
  let isBusy = false, isDue = false, isStopped = false;
  async function call() {
    if (isBusy) { isDue = true; return; }
    isBusy = true;
    isDue = false;
    const began = performance.now();
    try { await work(); } catch (error) { console.warn(error.message); }
    setTimeout(() => { isBusy = false; if (isDue && !isStopped) call(); }, Math.max(ms, 3 * (performance.now() - began)));
  }
  call.stop = () => { isStopped = true; };
  return call;
}

function chart(id, label) { return el("div", { id, class: "chart", role: "img", "aria-label": label }); }

function build(page, name, state) {
  const view = { status: el("span"), about: el("p", { class: "soft summary", text: " " }), error: el("p", { class: "error", hidden: true }), problems: el("div"), bar: progressBar("progress"),
                 path: el("code"), tensorboard: el("code"), config: el("pre", { class: "config", tabindex: "0" }), best: el("dl", { class: "values" }), bestConfig: el("pre", { class: "config", tabindex: "0" }),
                 family: el("div", { class: "family", tabindex: "0", role: "region", "aria-label": "The networks that the best one descends from" }), schedules: el("div", { class: "grid" }), ray: el("p", { class: "hint" }), board: el("p", { class: "hint", hidden: true }) };
  view.tiles = Object.fromEntries(["trials", "best", "trial", "steps", "time"].map((key) => [key, tile(key)]));
  view.tiles.trials.element.append(view.bar.element);
  view.table = new DataTable({ label: "Trials", rowKey: (row) => row.trial, columns: trialColumns([], state, name), sort: { key: "trial", isUp: false },
                               rowClass: (row) => (state.head && row.trial === state.head.best_trial ? "best" : ""), empty: "No trials here (yet)." });
  view.filter = filterBox(view.table, "Filter the trials");
  view.parallel = new ParallelCoordinates((picked) => { state.picked = picked; view.clear.hidden = !picked; showTable(view, state, name); });
  view.clear = el("button", { type: "button", class: "quiet", text: "Forget the picked ranges", hidden: true, onclick: () => view.parallel.clear() });
  view.report = el("a", { href: `/report?name=${encodeURIComponent(name)}`, target: "_blank", text: "Report", hidden: true });
  const empty = (text) => el("p", { class: "empty-line overlay", text });
  view.noImportance = empty("Needs eight trials that differ.");
  view.noCurves = empty("No trial has reported yet.");
  view.noBest = empty("No trial has ended yet.");
  view.sections = {
    importance: section("Importance", { hint: "How much the objective depends on each key, by a random forest over the trials." }, chart("importance", "Importance of the keys"), view.noImportance),
    pareto: section("Pareto front", { hint: "Each dot is a trial; no trial is better than those on the line in every objective." }, chart("pareto", "Pareto front")),
    parallel: section("Parallel coordinates", { wide: true, hint: "A line is a trial; the stronger its colour, the better. Drag along an axis to pick trials: the table below shows them." }, view.parallel.element, view.clear),
    lineage: section("Lineage", { wide: true, hint: "Who was made from whom. A click on a dot shows the trial." }, chart("lineage", "Lineage of the trials")),
    family: section("Genealogy of the best network", { wide: true, hint: "From its first ancestor to itself, with what each changed." }, view.family),
  };
  for (const each of Object.values(view.sections)) each.hidden = true;
  page.append(
    el("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, el("a", { href: "#/", text: "All runs and searches" })),
    el("header", { class: "title" }, el("h1", { text: name }), view.status), view.about, view.error, view.problems,
    el("div", { class: "tiles five" }, Object.values(view.tiles).map((each) => each.element)),
    el("div", { class: "grid" },
      section("Best so far", {}, chart("best-so-far", "The best objective over the trials"), view.noBest),
      section("Learning curves", {}, chart("curves", "The objective of each trial over its steps"), view.noCurves),
      section("The best trial", { id: "best" }, view.best), view.sections.importance, view.sections.pareto, view.sections.family, view.sections.parallel, view.sections.lineage),
    view.schedules,
    el("section", { id: "trials" }, el("h2", { text: "Trials" }), view.filter.element, view.table.element),
    el("div", { class: "grid" },
      el("section", {}, el("div", { class: "section-head" }, el("h2", { text: "Config of the best" }), copyButton("the config of the best", () => view.bestConfig.textContent)), view.bestConfig),
      el("section", {}, el("div", { class: "section-head" }, el("h2", { text: "Config of the search" }), copyButton("the config of the search", () => view.config.textContent)), view.config),
      section("Elsewhere", { wide: true }, el("p", { class: "hint", text: "TensorBoard compares the trials, with their hyper-parameters:" }), el("div", { class: "command" }, view.tensorboard, copyButton("the TensorBoard command", () => view.tensorboard.textContent)), view.board,
        el("p", { class: "hint", text: "The directory of the search:" }), el("div", { class: "command" }, view.path, copyButton("the directory", () => view.path.textContent)), el("p", { class: "links" }, view.report), view.ray)));
  linkElsewhere(view.board, view.ray);
  return view;
}

function showHead(view, state, name) {
  const head = state.head, [goal] = head.goals;
  view.status.replaceChildren(statusMark(head.status));
  const what = [...head.keys, ...(head.architecture ? [`${head.architecture} networks`] : [])];
  setText(view.about, [head.method && String(head.method).replaceAll("_", " "), head.task, what.length ? `over ${what.join(", ")}` : ""].filter(Boolean).join(" · ") || " ");
  const counts = Object.entries(head.counts).map(([status, n]) => `${n} ${status}`).join(", ");
  view.tiles.trials.set(`${number(head.trials)}${head.total ? ` / ${number(head.total)}` : ""}`, counts ? `trials: ${counts}` : "trials");
  view.bar.set(head.trials, head.total);
  view.tiles.best.set(number(head.best && head.best.objective), `best ${goal.metric} (${goal.mode})`);
  view.tiles.trial.set(head.best_trial === null || head.best_trial === undefined ? "–" : String(head.best_trial), "best trial");
  view.tiles.steps.set(number(head.steps), "steps of all trials");
  view.tiles.time.set(duration(head.seconds), "time");
  view.error.hidden = !head.error;
  setText(view.error, head.error || "");
  view.problems.replaceChildren(...(head.problems.length ? [problems(head.problems)] : []));
  const best = head.best;
  view.best.replaceChildren(...(best ? [["trial", number(head.best_trial)], [goal.metric, number(best.objective)],
    ...Object.entries(best.config).map(([key, value]) => [key, typeof value === "number" ? String(+value.toPrecision(6)) : JSON.stringify(value)]),
    ...(best.network ? [["network", best.network]] : []),
    ...Object.entries(best.measures).map(([key, value]) => [key.replaceAll("_", " "), number(value)])].flatMap(([key, value]) => [el("dt", { text: key }), el("dd", { text: value })])
    : [el("dd", { class: "soft", text: "None yet: it is the first trial that ends with an objective." })]));
  if (head.best_config && !view.best.parentElement.querySelector("a")) view.best.after(el("p", { class: "links" }, el("a", { href: hash("run", `${name}/best`), text: "Open the best run" })));
  setText(view.bestConfig, head.best_config || (best ? `# on top of the base config:\n${Object.entries(best.config).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join("\n")}` : "No trial has ended yet."));
}

function trialColumns(names, state, search) {
  const at = Object.fromEntries(names.map((name, i) => [name, i]));
  const minor = new Set(["seconds", "parent", "flops", "latency_ms", "change", "genome"]);
  return (names.length ? names : ["trial", "status", "objective"]).map((key) => {
    const isNumber = state.rows.some((row) => typeof row[at[key]] === "number") || ["trial", "objective", "steps", "seconds"].includes(key);
    const column = { key, label: key === "objective" && state.head ? state.head.goals[0].metric : key.replace(/^train\.(optimizer\.)?/, "").replaceAll("_", " "), title: key,
                     numeric: isNumber, minor: minor.has(key), value: (row) => row[key], cell: (row, td) => { setText(td, row[key] === null || row[key] === undefined ? "" : number(row[key])); td.title = td.textContent; } };
    if (key === "trial") column.cell = (row, td) => { if (!td.firstChild) td.append(el("button", { type: "button", class: "link", text: String(row.trial), "aria-label": `Trial ${row.trial}`, onclick: () => openTrial(search, row.trial) })); };
    if (key === "status") column.cell = (row, td) => td.replaceChildren(statusMark(row.status));
    return column;
  });
}

function showTable(view, state, name) {
  const key = state.columns.join("\n");
  if (view.columnsKey !== key) {
    view.columnsKey = key;
    view.table.setColumns(trialColumns(state.columns, state, name));
    state.objects = [];
  }
  state.objects ||= [];
  if (state.objects.length > state.rows.length) state.objects = [];
  for (let i = state.objects.length; i < state.rows.length; i += 1) state.objects.push(Object.fromEntries(state.columns.map((name, k) => [name, state.rows[i][k]])));
  const rows = [...state.objects, ...state.running];
  view.table.accepts = (row) => !state.picked || state.picked.has(row.trial);
  view.table.setRows(rows);
  view.filter.tell();
}

function drawFigures(view, state, name) {
  const { head, figures: f, importance } = state;
  if (!head) return;
  const best = head.best_trial;
  if (f) {
    view.noBest.hidden = f.best_so_far.x.length > 0;
    view.noCurves.hidden = f.curves.curves.length > 0;
    Figures.bestSoFar("best-so-far", f.best_so_far, head.goals[0].metric);
    Figures.curves("curves", f.curves, best);
    show(view.sections.parallel, f.parallel.axes.length > 1 && f.parallel.trials.length > 1, () => view.parallel.set(f.parallel));
    show(view.sections.pareto, f.pareto && f.pareto.points.length > 0, () => Figures.pareto("pareto", f.pareto));
    show(view.sections.lineage, f.lineage.nodes.length > 0, () => drawLineage(f.lineage, view, name));
    drawSchedules(view, f, best);
  }
  show(view.sections.family, Boolean(head.architecture) && best !== null && best !== undefined, () => {});
  show(view.sections.importance, head.keys.length > 0 || Boolean(importance && importance.length), () => {
    view.noImportance.hidden = Boolean(importance && importance.length);
    setText(view.noImportance, importance ? "Needs eight trials that differ." : "Learning it…");
    view.sections.importance.classList.toggle("wide", !view.sections.pareto.hidden);
    if (importance && importance.length) Figures.importance("importance", importance);
  });
}

function show(section_, is, draw) {
  section_.hidden = !is;
  if (is) draw();
}

function drawLineage(lineage, view, name) {
  Figures.lineage("lineage", lineage);
  const place = document.getElementById("lineage");
  view.lineageNodes = lineage.nodes;
  if (!view.hasLineageClick) {
    view.hasLineageClick = true;
    place.on("plotly_click", ({ points }) => {
      const node = points[0] && points[0].curveNumber === 1 ? view.lineageNodes[points[0].pointNumber] : null;
      if (node) openTrial(name, node.trial);
    });
  }
}

function drawSchedules(view, f, best) {
  const keys = Object.keys(f.schedule.keys);
  view.schedules.hidden = !keys.length;
  if (view.scheduleKeys !== keys.join("\n")) {
    view.scheduleKeys = keys.join("\n");
    view.schedules.replaceChildren(...keys.map((key, i) => section(`${key} over the steps`, { hint: "A line is a member; the best one's is drawn strongly. A dot: it went on from another's weights." }, chart(`schedule-${i}`, `${key} of each member over the steps`))));
  }
  keys.forEach((key, i) => {
    Figures.schedule(`schedule-${i}`, f.schedule.keys[key], key, best);
    drawCopies(`schedule-${i}`, f.schedule.keys[key], f.copies);
  });
}

// A dot where a member went on from another's weights, at the value it has from there on.
function drawCopies(id, series, copies) {
  const x = [], y = [], text = [];
  const of = new Map(series.map((each) => [each.trial, each]));
  for (const { trial, step, parent } of copies) {
    const own = of.get(trial), at = own ? own.x.indexOf(step) : -1;
    if (at >= 0) { x.push(step); y.push(own.y[at]); text.push(`trial ${trial} copied trial ${parent} at step ${step}`); }
  }
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--second").trim();
  if (x.length) Plotly.addTraces(id, { x, y, text, mode: "markers", marker: { size: 6, color: colour }, hovertemplate: "%{text}: %{y:.4g}<extra></extra>" });
}
