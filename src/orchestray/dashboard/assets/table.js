// A table that sorts by a click, filters by text, and changes in place: rows that stay are the same elements, so that
// nothing jumps and the focus stays where it is. Shows the first rows, and more when asked.
import { el, setText } from "./dom.js";

const PAGE = 100;

export class DataTable {
  // columns: [{ key, label, numeric, minor, value(row), cell(row, td) }]; `minor` ones are left out on small screens.
  constructor({ label, columns, rowKey, rowClass = () => "", sort = null, empty = "Nothing matches the filter." }) {
    Object.assign(this, { columns, rowKey, rowClass, sort, rows: [], trs: new Map(), filterText: "", accepts: () => true, limit: PAGE });
    this.head = el("tr");
    this.body = el("tbody");
    this.note = el("p", { class: "hint note", text: empty, hidden: true });
    this.more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => { this.limit += 4 * PAGE; this.render(); } });
    this.table = el("table", { "aria-label": label }, el("thead", {}, this.head), this.body);
    this.element = el("div", {}, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, this.table), this.note, this.more);
    this.setColumns(columns);
  }

  setColumns(columns) {
    this.columns = columns;
    this.trs.clear();
    this.head.replaceChildren(...columns.map((column) => {
      const button = el("button", { type: "button", text: column.label, onclick: () => this.sortBy(column.key) });
      return el("th", { scope: "col", class: this.cellClass(column), "data-key": column.key, title: column.title || null }, button);
    }));
    this.markSort();
  }

  cellClass(column) { return [column.numeric ? "number" : "text", column.minor ? "minor" : ""].join(" ").trim(); }

  sortBy(key) {
    const column = this.columns.find((each) => each.key === key);
    const isSame = this.sort && this.sort.key === key;
    this.sort = { key, isUp: isSame ? !this.sort.isUp : !column.numeric };
    this.markSort();
    this.render();
  }

  markSort() {
    for (const th of this.head.children) {
      const isSorted = this.sort && this.sort.key === th.dataset.key;
      th.setAttribute("aria-sort", isSorted ? (this.sort.isUp ? "ascending" : "descending") : "none");
    }
  }

  filter(text, accepts = this.accepts) {
    this.filterText = text.trim().toLowerCase();
    this.accepts = accepts;
    this.limit = PAGE;
    this.render();
  }

  setRows(rows) {
    this.rows = rows;
    this.render();
  }

  matching() {
    const words = this.filterText.split(/\s+/).filter(Boolean);
    return this.rows.filter((row) => this.accepts(row) && (!words.length || this.matches(row, words)));
  }

  matches(row, words) {
    const text = this.columns.map((column) => text_(column.value(row))).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  ordered() {
    const rows = this.matching();
    const column = this.sort && this.columns.find((each) => each.key === this.sort.key);
    if (!column) return rows;
    const sign = this.sort.isUp ? 1 : -1;
    return rows.map((row) => [column.value(row), row]).sort(([a], [b]) => {
      if (isNothing(a) || isNothing(b)) return isNothing(a) - isNothing(b);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    }).map(([, row]) => row);
  }

  render() {
    const rows = this.ordered(), shown = rows.slice(0, this.limit);
    const trs = shown.map((row) => this.tr(row));
    const present = [...this.body.children];
    if (trs.length !== present.length || trs.some((tr, i) => tr !== present[i])) {
      const focused = document.activeElement;
      this.body.replaceChildren(...trs);
      if (focused && focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
    }
    this.note.hidden = rows.length > 0;
    this.more.hidden = shown.length === rows.length;
    setText(this.more, `Show more (${(rows.length - shown.length).toLocaleString("en")} left)`);
    this.count = rows.length;
  }

  tr(row) {
    const key = this.rowKey(row);
    let kept = this.trs.get(key);
    if (!kept) {
      const cells = this.columns.map((column) => el("td", { class: this.cellClass(column) }));
      kept = { tr: el("tr", { "data-key": String(key) }, cells), cells, row: null };
      this.trs.set(key, kept);
    }
    if (kept.row !== row) {
      kept.row = row;
      this.columns.forEach((column, i) => column.cell(row, kept.cells[i]));
    }
    const name = this.rowClass(row);
    if (kept.tr.className !== name) kept.tr.className = name;
    return kept.tr;
  }
}

const isNothing = (value) => value === null || value === undefined || value === "";
const text_ = (value) => (isNothing(value) ? "" : String(value));

// A box to type a filter into, with how many rows it leaves.
export function filterBox(table, label, more = []) {
  const input = el("input", { type: "search", placeholder: label, "aria-label": label });
  const count = el("span", { class: "hint count", role: "status" });
  const tell = () => setText(count, `${table.count.toLocaleString("en")} of ${table.rows.length.toLocaleString("en")}`);
  input.addEventListener("input", () => { table.filter(input.value); tell(); });
  return { element: el("div", { class: "filters" }, input, more, count), tell, input };
}
