// All runs and searches of the directory.
import { age, duration, el, hash, number, progressBar, setText, statusMark } from "./dom.js";
import { follow } from "./live.js";
import { DataTable, filterBox } from "./table.js";

export function overviewPage(page) {
  const rows = new Map();
  const table = new DataTable({
    label: "Runs and searches", rowKey: (row) => row.name, sort: { key: "started", isUp: false }, columns: columns(),
  });
  const kind = select("Show", { "": "Runs and searches", run: "Runs", search: "Searches" });
  const status = select("Status", { "": "Any status", running: "Running", succeeded: "Succeeded", failed: "Failed", interrupted: "Interrupted", died: "Died", damaged: "Damaged" });
  const filter = filterBox(table, "Filter by name, task, method", [kind, status]);
  const choose = () => {
    table.filter(filter.input.value, (row) => (!kind.value || row.kind === kind.value) && (!status.value || row.status === status.value));
    filter.tell();
  };
  kind.addEventListener("change", choose);
  status.addEventListener("change", choose);

  const title = el("h1", { text: "Runs and searches" });
  const summary = el("p", { class: "soft summary", text: " " });
  const empty = el("div", { class: "empty", hidden: true });
  const list = el("section", { class: "list" }, filter.element, table.element);
  const more = el("p", { class: "hint" }, el("a", { href: "#/predictions", text: "Predictions" }), " of the planner beside what runs took");
  page.append(el("header", {}, title, summary), list, empty, more);

  function update(runsDir) {
    const all = [...rows.values()];
    table.setRows(all);
    filter.tell();
    const running = all.filter((row) => row.status === "running").length;
    const searches = all.filter((row) => row.kind === "search").length;
    setText(summary, all.length ? `${count(all.length - searches, "run")}, ${count(searches, "search", "es")}; ${running} running` : " ");
    list.hidden = !all.length;
    empty.hidden = all.length > 0;
    if (!all.length && runsDir !== undefined) {
      empty.replaceChildren(el("h2", { text: `No runs in ${runsDir} yet` }), el("p", { text: "This page shows a run as soon as it begins. For example:" }),
        el("pre", { text: "orchestray train configs/train/digits.yaml\norchestray search configs/search/digits-pbt.yaml" }));
    }
  }

  let runsDir;
  const ages = setInterval(() => {
    for (const cell of table.body.querySelectorAll("[data-started]")) setText(cell, age(Number(cell.dataset.started)));
  }, 10000);
  const stop = follow("", {
    snapshot(all) {
      runsDir = all.runs_dir;
      rows.clear();
      for (const row of all.rows) rows.set(row.name, row);
      update(runsDir);
    },
    change({ changed, removed }) {
      for (const row of changed) rows.set(row.name, row);
      for (const name of removed) rows.delete(name);
      update(runsDir);
    },
    missing() {},
  });
  return { leave() { stop(); clearInterval(ages); } };
}

const count = (n, word, ending = "s") => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : ending}`;

function select(label, options) {
  return el("select", { "aria-label": label }, Object.entries(options).map(([value, text]) => el("option", { value, text })));
}

function columns() {
  const plain = (text) => (row, td) => setText(td, text(row));
  return [
    { key: "name", label: "Name", value: (row) => `${row.name} ${row.about} ${row.kind}`, cell(row, td) {
      if (!td.firstChild) td.append(el("a", { href: hash(row.kind, row.name), text: row.name }), el("span", { class: "small-only" }), el("span", { class: "about" }));
      if (td.dataset.status !== row.status) { td.dataset.status = row.status; td.children[1].replaceChildren(statusMark(row.status)); }
      setText(td.lastChild, [row.kind, row.about.replaceAll("_", " ")].filter(Boolean).join(" · "));
    } },
    { key: "status", label: "Status", minor: true, value: (row) => row.status, cell: (row, td) => td.replaceChildren(statusMark(row.status)) },
    { key: "progress", label: "Progress", numeric: true, value: (row) => (row.total ? (row.done || 0) / row.total : row.done), cell(row, td) {
      if (!td.firstChild) { td.bar = progressBar(`progress of ${row.name}`); td.append(el("span"), td.bar.element); }
      const unit = row.kind === "search" ? "trials" : "steps";
      setText(td.firstChild, row.done === null && !row.total ? "–" : `${number(row.done || 0)}${row.total ? ` / ${number(row.total)}` : ""} ${unit}`);
      td.bar.set(row.done, row.total);
    } },
    { key: "metric", label: "Metric", numeric: true, value: (row) => row.value, cell(row, td) {
      if (!td.firstChild) td.append(el("b"), el("span", { class: "about" }));
      setText(td.firstChild, number(row.value));
      setText(td.lastChild, row.value === null ? "" : row.metric || "");
    } },
    { key: "time", label: "Time", numeric: true, minor: true, value: (row) => row.seconds, cell: plain((row) => duration(row.seconds)) },
    { key: "started", label: "Started", numeric: true, minor: true, value: (row) => row.started_at, cell(row, td) {
      td.dataset.started = row.started_at || "";
      setText(td, age(row.started_at));
      td.title = row.started_at ? new Date(row.started_at * 1000).toLocaleString() : "";
    } },
  ];
}
