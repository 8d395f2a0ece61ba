// Which page is shown: the address after "#" says it.
import { el } from "./dom.js";
import { overviewPage } from "./overview.js";
import { predictionsPage } from "./predictions.js";
import { runPage } from "./run.js";
import { searchPage } from "./search.js";

const page = document.getElementById("page");
const pages = { run: runPage, search: searchPage };
let leave = () => {};
let redraw = () => {};

function show() {
  leave();
  document.getElementById("trial-dialog").close();
  const [, kind = "", ...rest] = location.hash.split("/");
  let name = "";
  try { name = decodeURIComponent(rest.join("/")); } catch { /* no name then */ }
  const make = kind === "predictions" ? predictionsPage : pages[kind] && name ? pages[kind] : overviewPage;
  const shown = kind === "predictions" ? "Predictions" : name;
  document.title = shown ? `${shown} – orchestray` : "orchestray";
  page.replaceChildren();
  const made = make(page, name, () => notFound(kind, name));
  leave = made.leave;
  redraw = made.redraw || (() => {});
  scrollTo(0, 0);
}

function notFound(kind, name) {
  page.replaceChildren(el("div", { class: "empty" }, el("h1", { text: "Nothing here" }),
    el("p", { text: `There is no ${kind} “${name}” in this directory (any more).` }),
    el("p", {}, el("a", { href: "#/", text: "All runs and searches" }))));
}

addEventListener("hashchange", () => { show(); page.focus({ preventScroll: true }); });
document.getElementById("theme").addEventListener("click", Theme.next);
Theme.onChange(() => redraw());
Theme.apply();
fetch("/api/about").then((response) => response.json()).then((about) => {
  const where = document.getElementById("where");
  where.textContent = about.runs_dir;
  where.title = about.runs_dir;
});
show();
