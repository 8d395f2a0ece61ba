// Draws the data that figures.py makes, with Plotly: the report of a search and the dashboard share this file.
// Colours come from the page's CSS variables, so that light and dark follow the page.
"use strict";

const Figures = (() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function theme() {
    return {
      ink: css("--ink"), soft: css("--soft"), faint: css("--faint"), line: css("--line"),
      accent: css("--accent"), second: css("--second"), good: css("--good"), bad: css("--bad"),
      scale: [[0, css("--scale-low")], [0.5, css("--scale-middle")], [1, css("--scale-high")]],
    };
  }

  function layout(more) {
    const t = theme();
    const axis = { gridcolor: t.line, zerolinecolor: t.line, linecolor: t.line, automargin: true,
                   title: { font: { size: 12, color: t.soft } } };
    const { xaxis, yaxis, ...rest } = more || {};
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, height: 300,
      font: { family: css("--font") || "system-ui, sans-serif", size: 12, color: t.ink },
      margin: { l: 8, r: 12, t: 8, b: 8 }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: css("--card"), bordercolor: t.line, font: { color: t.ink } },
      xaxis: { ...axis, ...xaxis, title: { ...axis.title, text: (xaxis || {}).title } },
      yaxis: { ...axis, ...yaxis, title: { ...axis.title, text: (yaxis || {}).title } },
      ...rest,
    };
  }

  const options = { responsive: true, displayModeBar: false };
  const draw = (id, traces, more) => Plotly.react(id, traces, layout(more), options);
  const escape = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" }[c]));

  function bestSoFar(id, data, metric) {
    const t = theme();
    draw(id, [
      { x: data.x, y: data.objectives, customdata: data.trials, mode: "markers", name: "trial",
        marker: { size: 6, color: t.faint }, hovertemplate: `trial %{customdata}: %{y:.5g}<extra></extra>` },
      { x: data.x, y: data.best, mode: "lines", name: "best so far", line: { color: t.accent, width: 2, shape: "hv" },
        hovertemplate: `best %{y:.5g}<extra></extra>` },
    ], { xaxis: { title: "trials ended", rangemode: "tozero" }, yaxis: { title: metric } });
  }

  // The best trial's is drawn strongly, above the others; while none has ended that is the last, the best until now.
  function curves(id, data, bestTrial) {
    const t = theme();
    const strong = data.curves.some((curve) => curve.trial === bestTrial) ? bestTrial : data.curves.at(-1)?.trial;
    const sorted = [...data.curves].sort((a, b) => (a.trial === strong) - (b.trial === strong));
    draw(id, sorted.map((curve) => {
      const isBest = curve.trial === strong;
      return {
        x: curve.x, y: curve.y, type: "scatter", mode: curve.x.length > 1 ? "lines" : "markers",
        name: `trial ${curve.trial}`, opacity: isBest ? 1 : 0.55,
        line: { width: isBest ? 2.5 : 1, color: isBest ? t.accent : t.faint },
        marker: { size: isBest ? 8 : 5, color: isBest ? t.accent : t.faint },
        hovertemplate: `trial ${curve.trial} (${curve.status})<br>step %{x}: %{y:.5g}<extra></extra>`,
      };
    }), { xaxis: { title: "step", rangemode: "tozero" }, yaxis: { title: data.metric } });
  }

  function importance(id, data) {
    const t = theme();
    const bars = [...data].reverse();
    draw(id, [{
      type: "bar", orientation: "h", x: bars.map((b) => b.importance), y: bars.map((b) => b.key),
      error_x: { type: "data", array: bars.map((b) => b.spread), color: t.soft, thickness: 1, width: 3 },
      marker: { color: t.accent }, width: 0.5, hovertemplate: "%{y}: %{x:.0%}<extra></extra>",
    }], { xaxis: { tickformat: ".0%", rangemode: "tozero" }, height: Math.max(160, 44 * bars.length + 60) });
  }

  function parallel(id, data) {
    const t = theme();
    const dimensions = data.axes.map((axis) => ({
      label: axis.label.length > 24 ? "…" + axis.label.slice(-23) : axis.label, values: axis.values,
      ...(axis.ticks ? { tickvals: axis.ticks.map((p) => p[0]), ticktext: axis.ticks.map((p) => p[1]) } : {}),
    }));
    const isNarrow = document.getElementById(id).clientWidth < 170 * dimensions.length;
    draw(id, [{
      type: "parcoords", dimensions, line: { color: data.scores, colorscale: t.scale, showscale: false },
      labelfont: { color: t.ink, size: 12 }, tickfont: { color: t.soft, size: 11 }, rangefont: { color: t.soft, size: 10 },
      labelangle: isNarrow ? -20 : 0, unselected: { line: { color: t.line, opacity: 0.3 } },
    }], { height: 360, margin: { l: 70, r: 50, t: isNarrow ? 100 : 60, b: 24 } });
  }

  // Ticks of an axis of few whole numbers: left to themselves they are halves.
  function whole(values) { return Math.max(...values, 0) - Math.min(...values, 0) < 8 ? { dtick: 1 } : {}; }

  function lineage(id, data) {
    const t = theme();
    const x = [], y = [];
    for (const [from, to] of data.edges) {
      x.push(data.nodes[from].x, data.nodes[to].x, null);
      y.push(data.nodes[from].y, data.nodes[to].y, null);
    }
    const known = data.nodes.filter((n) => n.objective !== null && n.objective !== undefined).map((n) => n.objective);
    draw(id, [
      { x, y, mode: "lines", opacity: 0.6, line: { color: t.faint, width: 1.25 }, hoverinfo: "skip" },
      { x: data.nodes.map((n) => n.x), y: data.nodes.map((n) => n.y), mode: "markers",
        text: data.nodes.map((n) => `trial ${n.trial}, step ${n.step}` + (n.change ? `<br>${escape(n.change)}` : "")),
        marker: { size: 8, color: data.nodes.map((n) => n.objective ?? (known.length ? Math.min(...known) : 0)),
                  colorscale: t.scale, line: { width: 1, color: css("--card") } },
        hovertemplate: "%{text}<extra></extra>" },
    ], { xaxis: { title: data.axis, ...whole(data.nodes.map((n) => n.x)) },
         yaxis: { title: "trial", ...whole(data.nodes.map((n) => n.y)) }, height: 360 });
  }

  function schedule(id, series, key, bestTrial) {
    const t = theme();
    const sorted = [...series].sort((a, b) => (a.trial === bestTrial) - (b.trial === bestTrial));
    const values = series.flatMap((s) => s.y);
    const isLog = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 20;
    draw(id, sorted.map((s) => {
      const isBest = s.trial === bestTrial;
      return { x: s.x, y: s.y, mode: "lines", line: { shape: "hv", width: isBest ? 2.5 : 1, color: isBest ? t.accent : t.faint },
               opacity: isBest ? 1 : 0.55, hovertemplate: `trial ${s.trial}, step %{x}: %{y:.4g}<extra></extra>` };
    }), { xaxis: { title: "step" }, yaxis: { title: key, ...(isLog ? { type: "log", dtick: 1, exponentformat: "e" } : {}) } });
  }

  function pareto(id, data) {
    const t = theme();
    const split = (isFront) => data.points.filter((p) => p.is_front === isFront);
    const trace = (points, more) => ({
      x: points.map((p) => p.values[1]), y: points.map((p) => p.values[0]), customdata: points.map((p) => p.trial),
      hovertemplate: `trial %{customdata}<br>${data.metrics[1]} %{x:.4g}<br>${data.metrics[0]} %{y:.5g}<extra></extra>`, ...more });
    const front = split(true).sort((a, b) => a.values[1] - b.values[1]);
    draw(id, [
      trace(split(false), { mode: "markers", marker: { size: 6, color: t.faint } }),
      trace(front, { mode: "lines+markers", line: { color: t.accent, width: 1.5 }, marker: { size: 9, color: t.accent } }),
    ], { xaxis: { title: data.metrics[1] }, yaxis: { title: data.metrics[0] } });
  }

  // A table whose columns sort by a click; `filter` is a text that rows must hold.
  function table(element, data, bestTrial) {
    const state = { column: -1, isUp: true, filter: "" };
    const number = (v) => Number.isInteger(v) ? String(v) : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(5));
    const text = (v) => v === null || v === undefined ? "" : typeof v === "number" ? number(v) : String(v);
    const compare = (a, b) => {
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return state.isUp ? order : -order;
    };
    function render() {
      const rows = data.rows.filter((row) => !state.filter || row.some((v) => text(v).toLowerCase().includes(state.filter)));
      if (state.column >= 0) rows.sort((a, b) => compare(a[state.column], b[state.column]));
      const head = data.columns.map((name, i) => {
        const arrow = i === state.column ? (state.isUp ? " ▲" : " ▼") : "";
        const sort = i === state.column ? (state.isUp ? "ascending" : "descending") : "none";
        return `<th aria-sort="${sort}"><button type="button" data-column="${i}">${escape(name)}${arrow}</button></th>`;
      }).join("");
      const status = data.columns.indexOf("status"), trial = data.columns.indexOf("trial");
      const body = rows.map((row) => `<tr${row[trial] === bestTrial ? ' class="best"' : ""}>` + row.map((v, i) =>
        i === status ? `<td><span class="status ${escape(v)}">${escape(v)}</span></td>`
          : `<td class="${typeof v === "number" ? "number" : "text"}" title="${escape(text(v)).replace(/"/g, "&quot;")}">${escape(text(v))}</td>`).join("") + "</tr>").join("");
      element.innerHTML = `<table><thead><tr>${head}</tr></thead><tbody>${body}</tbody></table>`;
    }
    element.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-column]");
      if (!button) return;
      const column = Number(button.dataset.column);
      state.isUp = column === state.column ? !state.isUp : true;
      state.column = column;
      render();
    });
    render();
    return { filter(value) { state.filter = value.trim().toLowerCase(); render(); }, update(next, best) { data = next; bestTrial = best; render(); } };
  }

  return { bestSoFar, curves, importance, parallel, lineage, schedule, pareto, table, escape };
})();
