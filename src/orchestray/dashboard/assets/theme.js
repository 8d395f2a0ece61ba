// Light, dark, or as the system has it. The shared style sheet holds the dark colours in a media rule: what the user
// chooses is written there, before anything is shown.
"use strict";

const Theme = (() => {
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let chosen = "auto";
  try { chosen = names[localStorage.getItem("theme")] ? localStorage.getItem("theme") : "auto"; } catch { /* no storage */ }

  function apply() {
    for (const rule of document.getElementById("shared-style").sheet.cssRules) {
      if (rule instanceof CSSMediaRule && rule.cssText.includes("--page")) {
        rule.media.mediaText = { auto: "(prefers-color-scheme: dark)", dark: "all", light: "not all" }[chosen];
      }
    }
    document.documentElement.dataset.theme = chosen;
    document.documentElement.style.colorScheme = chosen === "auto" ? "light dark" : chosen;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = names[chosen];
      button.setAttribute("aria-label", `Colours: ${chosen === "auto" ? "as the system" : chosen}`);
    }
    for (const listener of listeners) listener();
  }

  function next() {
    const order = Object.keys(names);
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try { localStorage.setItem("theme", chosen); } catch { /* it lasts until the page is left */ }
    apply();
  }

  dark.addEventListener("change", () => { if (chosen === "auto") apply(); });
  apply();
  return { apply, next, onChange: (listener) => listeners.push(listener) };
})();
