// Curves of a run: Plotly with the page's colours; the figures of a search are drawn by the shared figures.js.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function layout(title, isLog, more = {}) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true,
                 exponentformat: "e", minexponent: 5, separatethousands: true,  // 15,000, not 1.5e+4
                 fixedrange: false, title: { font: { size: 12, color: css("--soft") } } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, height: 260, uirevision: "kept", dragmode: "zoom",
    font: { family: css("--font"), size: 12, color: css("--ink") }, margin: { l: 8, r: 12, t: 8, b: 8 },
    hovermode: "x unified", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
    showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: css("--soft") }, bgcolor: "rgba(0,0,0,0)" },
    xaxis: { ...axis, title: { ...axis.title, text: "step" }, rangemode: "tozero" },
    yaxis: { ...axis, title: { ...axis.title, text: title }, type: isLog ? "log" : "linear" }, ...more,
  };
}

const options = { responsive: true, displayModeBar: false, displaylogo: false };

export function curve(id, key, series, { isLog = false, isSmooth = false } = {}) {
  const colours = { train: css("--accent"), validation: css("--second") };
  const traces = [];
  for (const [split, points] of Object.entries(series)) {
    const colour = colours[split] || css("--good"), isTrain = split === "train";
    const isSmoothed = isTrain && isSmooth && points.x.length > 20 && isNoisy(points.y);
    if (isSmoothed) {
      traces.push({ x: points.x, y: smoothed(points.y), name: "train, smoothed", mode: "lines", line: { color: colour, width: 2 }, hovertemplate: "%{y:.5g}" });
    }
    traces.unshift({
      x: points.x, y: points.y, name: split, mode: isTrain && points.x.length > 1 ? "lines" : "lines+markers", opacity: isSmoothed ? 0.3 : 1,
      line: { color: colour, width: isTrain ? 1.5 : 2 }, marker: { size: points.x.length > 60 ? 3 : 6, color: colour }, hovertemplate: "%{y:.5g}",
    });
  }
  const made = layout(key.replaceAll("_", " "), isLog);
  const values = new Set(Object.values(series).flatMap((points) => points.y));
  const [only] = values;
  if (values.size === 1 && only > 0 && !isLog) made.yaxis.range = [0, 2 * only];  // else a constant hangs in mid-air
  Plotly.react(id, traces, made, options);
}

export function histogram(id, counts) {
  const trace = { type: "bar", x: counts.map((c) => c[0]), y: counts.map((c) => c[1]), marker: { color: css("--accent") }, width: 0.7, hovertemplate: "staleness %{x}: %{y} updates<extra></extra>" };
  const more = { showlegend: false, hovermode: "closest" };
  const made = layout("updates", false, more);
  made.xaxis = { ...made.xaxis, title: { ...made.xaxis.title, text: "staleness" }, dtick: counts.length > 12 ? undefined : 1, rangemode: "normal" };
  Plotly.react(id, [trace], made, options);
}

// Predicted against measured seconds of a step, both logarithmic; on the line a prediction is right.
export function agreement(id, rows) {
  const all = rows.flatMap((row) => [row.predicted_s, row.measured_s, ...(row.interval_s || [])]);
  const ends = [Math.min(...all) / 1.3, Math.max(...all) * 1.3];
  const bars = (row, side) => (row.interval_s ? Math.abs(row.interval_s[side] - row.predicted_s) : 0);
  const runs = {
    x: rows.map((row) => row.predicted_s), y: rows.map((row) => row.measured_s), text: rows.map((row) => `${row.name}<br>${row.scheme}`), name: "runs, with 80 % intervals",
    mode: "markers", marker: { size: 8, color: css("--accent") }, hovertemplate: "%{text}<br>predicted %{x:.4g} s, measured %{y:.4g} s<extra></extra>",
    error_x: { type: "data", array: rows.map((row) => bars(row, 1)), arrayminus: rows.map((row) => bars(row, 0)), color: css("--soft"), thickness: 1, width: 3 },
  };
  const line = { x: ends, y: ends, name: "as predicted", mode: "lines", line: { color: css("--second"), width: 1.5 }, hoverinfo: "skip" };
  const made = layout("measured step, s", true, { hovermode: "closest", height: 360 });
  made.xaxis = { ...made.xaxis, title: { ...made.xaxis.title, text: "predicted step, s" }, type: "log", rangemode: "normal" };
  Plotly.react(id, [line, runs], made, options);
}

// Whether a curve goes up and down at every other point; a schedule of the learning rate does not.
function isNoisy(values) {
  let turns = 0;
  for (let i = 2; i < values.length; i += 1) if ((values[i] - values[i - 1]) * (values[i - 1] - values[i - 2]) < 0) turns += 1;
  return turns > values.length / 10;
}

// Exponential moving average without the bias of its beginning.
function smoothed(values) {
  const keep = Math.exp(-1 / Math.max(2, values.length / 60));
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}
