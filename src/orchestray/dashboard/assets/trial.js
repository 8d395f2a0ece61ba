// One trial in a dialog: what was chosen, what came of it, its network, and the networks it descends from.
import { copyButton, duration, el, number, statusMark } from "./dom.js";
import { ask } from "./live.js";

const dialog = document.getElementById("trial-dialog");

export async function openTrial(search, trial) {
  dialog.replaceChildren(el("h2", { id: "trial-title", text: `Trial ${trial}` }), el("p", { class: "soft", text: "…" }), closer());
  if (!dialog.open) dialog.showModal();
  let found;
  try { found = await ask("/api/search/trial", { name: search, trial }); } catch (error) {
    dialog.replaceChildren(el("h2", { id: "trial-title", text: `Trial ${trial}` }), el("p", { class: "error", text: error.message }), closer());
    return;
  }
  const { line, network } = found;
  const facts = [["status", statusMark(line.status)], ["objective", number(line.objective)],
    ...Object.entries(line.objectives || {}).map(([key, value]) => [key, number(value)]),
    ...Object.entries(line.config || {}).map(([key, value]) => [key, typeof value === "number" ? exact(value) : JSON.stringify(value)]),
    ...["steps", "parameters", "flops", "latency_ms", "parent"].filter((key) => line[key] !== null && line[key] !== undefined).map((key) => [key.replaceAll("_", " "), number(line[key])]),
    ...(line.seconds ? [["time", duration(line.seconds)]] : []), ...(line.change ? [["change", line.change]] : []), ...(line.reason ? [["reason", String(line.reason)]] : [])];
  dialog.replaceChildren(...[
    el("h2", { id: "trial-title", text: `Trial ${trial}` }), closer(),
    line.error ? el("p", { class: "error", text: line.error }) : null,
    el("dl", { class: "values" }, facts.flatMap(([key, value]) => [el("dt", { text: key }), el("dd", {}, value)])),
    network ? el("div", { class: "network" }, picture(network)) : null,
    line.genome !== undefined && line.genome !== null ? el("details", {}, el("summary", { text: "Genome" }), el("pre", { text: JSON.stringify(line.genome, null, 1) }), copyButton("the genome", JSON.stringify(line.genome))) : null,
  ].filter(Boolean));
}

function closer() { return el("button", { type: "button", class: "quiet close", text: "Close", onclick: () => dialog.close() }); }

const exact = (value) => String(Number.isInteger(value) ? value : +value.toPrecision(6));

// The server draws it; it is read as XML, so that nothing in it can run.
export function picture(svg) {
  const root = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  return root.nodeName === "svg" ? document.importNode(root, true) : el("p", { class: "soft", text: "The picture is damaged." });
}

// The line of descent of a trial, the first ancestor first.
export function family(place, found, open) {
  place.replaceChildren(...found.ancestors.map((each, i) => el("figure", { class: i === found.ancestors.length - 1 ? "member is-last" : "member" },
    el("figcaption", {}, el("button", { type: "button", class: "link", text: `trial ${each.trial}`, onclick: () => open(each.trial) }),
      el("b", { text: number(each.objective) }), el("span", { class: "soft", text: each.change || (i ? "" : "drawn") })),
    each.network ? el("div", { class: "network" }, picture(each.network)) : el("p", { class: "soft", text: "no picture" }))));
  place.scrollLeft = place.scrollWidth;
}
