// Elements and texts. Everything that comes from files is put in as text, never as HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function number(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isSafeInteger(value)) return value.toLocaleString("en");  // a larger float is whole by its form, not exact
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
}

export function age(unixSeconds) {
  if (!unixSeconds) return "–";
  const seconds = Math.max(0, Date.now() / 1000 - unixSeconds);
  const units = [[86400 * 2, 86400, "d"], [7200, 3600, "h"], [90, 60, "min"]];
  for (const [from, size, unit] of units) if (seconds >= from) return `${Math.round(seconds / size)} ${unit} ago`;
  return seconds < 5 ? "now" : `${Math.round(seconds)} s ago`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count, unit = "B";
  for (const next of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    value /= 1000;
    unit = next;
  }
  return `${unit === "B" ? Math.round(value) : +value.toPrecision(3)} ${unit}`;
}

export function statusMark(status) {
  return el("span", { class: `status ${/^[a-z]+$/.test(status) ? status : ""}`, text: status });
}

export function tile(name) {
  const value = el("b", { text: "–" }), label = el("span", { text: name });
  const element = el("div", { class: "tile" }, value, label);
  return { element, set(text, name_) { setText(value, text); value.title = text; if (name_) setText(label, name_); } };
}

export function progressBar(label) {
  const bar = el("progress", { max: 1, value: 0, "aria-label": label });
  return {
    element: bar,
    set(done, total) {
      if (total) { bar.max = total; bar.value = Math.min(done || 0, total); } else { bar.max = 1; bar.value = 0; }
    },
  };
}

export function section(title, { wide = false, hint = "", id = "" } = {}, ...children) {
  return el("section", { class: wide ? "wide" : "", id: id || null }, el("h2", { text: title }),
            hint ? el("p", { class: "hint", text: hint }) : null, ...children);
}

export function copyButton(what, text) {
  const button = el("button", { type: "button", class: "quiet", text: "Copy", "aria-label": `Copy ${what}` });
  button.addEventListener("click", async () => {
    const value = typeof text === "function" ? text() : text;
    try { await navigator.clipboard.writeText(value); } catch {
      const area = el("textarea", { class: "off-screen", "aria-hidden": "true" });
      area.value = value;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

export function problems(list) {
  return el("ul", { class: "problems" }, (list || []).map((text) => el("li", { text })));
}

export const hash = (kind, name) => `#/${kind}/${encodeURIComponent(name)}`;
