"""Draw what runs say of their exchange beside the loss, as SVG, from the run directories alone:
`python docs/plot_exchange.py runs/digits-gossip runs/digits-downpour picture.svg`.

How old the weights of a gradient were, how far replicas are apart, what a compression still keeps, what was sent of
what it would have been, what was dropped, how long each worker waited: whichever of these the runs have. Needs nothing
but Python.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from plot_run import STYLE, WIDTH, Points, read_lines, text

COLOURS = (("#0969da", "#4493f8"), ("#bc4c00", "#f0883e"), ("#1a7f37", "#3fb950"), ("#8250df", "#ab7df8"),
           ("#cf222e", "#f85149"), ("#1b7c83", "#39c5cf"))  # fmt: skip
"""Of the runs, on a light page and on a dark one."""
EDGE, GAP = 24, 28
PANEL_WIDTH = (WIDTH - 2 * EDGE - GAP) / 2
PLOT_HEIGHT, PLOT_LEFT, ROW, TITLE = 150, 44, 22, 24
MOST_ROWS = 24
LETTER = 7.3
"""About the width of a letter of a label."""


@dataclass(frozen=True)
class Run:
    """What is read of a run directory."""

    name: str
    number: int
    """Its colour."""
    result: dict[str, Any]
    lines: list[dict[str, Any]]
    """Of the steps."""


@dataclass(frozen=True)
class Part:
    """A bar: so much of a whole."""

    run: Run
    label: str
    part: float
    whole: float
    told: str


@dataclass(frozen=True)
class Panel:
    """One drawing, whose upper left corner is its (0, 0)."""

    title: str
    height: float
    parts: list[str]


def read(path: Path, number: int) -> Run:
    """Load the run of this directory; one that is not finished has no result yet."""
    if not (path / "metrics.jsonl").exists():
        sys.exit(f"{path} is no run directory: it has no metrics.jsonl")
    result = path / "result.json"
    told = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    steps = [line for line in read_lines(path / "metrics.jsonl") if "split" not in line]
    return Run(path.resolve().name, number, told, steps)


def staleness(runs: Sequence[Run]) -> Panel | None:
    """Bars side by side: the part of a run's pushes by the updates between read and write."""
    found = [(run, run.result["staleness"]["histogram"]) for run in runs if run.result.get("staleness")]
    if not found:
        return None
    shares = [(run, {int(age): n / sum(ages.values()) for age, n in ages.items()}) for run, ages in found]
    last = max(max(ages) for _, ages in shares)
    high = max(max(ages.values()) for _, ages in shares)
    axes = Axes(-0.5, last + 0.5, 100 * high)
    width = (axes.x(1) - axes.x(0)) * 0.8 / len(shares)
    bars = []
    for place, (run, ages) in enumerate(shares):
        for age, share in sorted(ages.items()):
            x, y = axes.x(age - 0.4) + place * width, axes.y(100 * share)
            bars.append(bar(x, y, width * 0.92, axes.y(0) - y, run))
    return axes.panel("Staleness of updates", bars, "% of pushes")


def curves(runs: Sequence[Run], key: str, title: str) -> Panel | None:
    """Draw a line a run, of what steps say under `key`."""
    found: list[tuple[Run, Points]] = [
        (run, points) for run in runs if (points := [(line["step"], line[key]) for line in run.lines if key in line])
    ]
    if not found:
        return None
    axes = Axes(0, max(points[-1][0] for _, points in found), max(y for _, points in found for _, y in points))
    drawn = []
    for run, points in found:
        places = [(axes.x(step), axes.y(value)) for step, value in points]
        drawn.append(f'<path d="M{" L".join(f"{x} {y}" for x, y in places)}" class="line{run.number}"/>')
        if len(places) <= MOST_ROWS:  # a single meeting is a point
            drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" class="run{run.number}"/>' for x, y in places]
    return axes.panel(title, drawn, "norm; by step")


def sent(runs: Sequence[Run]) -> Panel | None:
    """Draw the bytes that each run sent, beside those that it would have sent uncompressed."""
    found = [(run, run.result["bytes"]) for run in runs if run.result.get("bytes")]
    return bars_of(
        "Bytes sent, of what they would be uncompressed",
        [
            Part(run, run.name, moved["sent"], moved["dense"], f"{mb(moved['sent'])} of {mb(moved['dense'])} MB")
            for run, moved in found
            if moved["dense"]
        ],
        to_scale=True,
    )


def dropped(runs: Sequence[Run]) -> Panel | None:
    """Shares that were computed twice, and updates of shared memory that another has overwritten."""
    parts = []
    for run in runs:
        copies, lost = run.result.get("dropped_copies"), run.result.get("lost_updates")
        if copies is not None:
            shares = sum(worker["shares"] for worker in run.result["workers"])
            parts.append(Part(run, run.name, copies, max(shares, copies), f"{copies} of {shares} shares"))
        if lost is not None:
            updates = run.result["updates"]
            parts.append(Part(run, run.name, lost, updates, f"{lost} of {updates} updates"))
    return bars_of("Dropped, of what was computed", parts)


def waiting(runs: Sequence[Run]) -> Panel | None:
    """Draw the part of its time for which each worker waited for others."""
    parts = []
    for run in runs:
        workers = run.result.get("workers") or []
        if not any(worker["waited_s"] for worker in workers):  # there was nobody to wait for
            continue
        for number, worker in enumerate(workers):
            waited_s, whole_s = worker["waited_s"], worker["waited_s"] + worker["busy_s"]
            told = f"{waited_s:.2f} of {whole_s:.2f} s"
            parts.append(Part(run, f"{run.name}: {number}", waited_s, whole_s, told))
    return bars_of("Waiting, of each worker's time", parts)


def bars_of(title: str, rows: Sequence[Part], *, to_scale: bool = False) -> Panel | None:
    """Bars below each other, each as long as its part of the whole; all wholes are as wide, or to one scale."""
    if not rows:
        return None
    shown = rows[:MOST_ROWS]
    labels = min(max(len(row.label) for row in shown) * LETTER + 8, PANEL_WIDTH / 2)
    told = max(len(row.told) for row in shown) * LETTER * 0.9 + 8
    width = PANEL_WIDTH - labels - told
    drawn = []
    for number, row in enumerate(shown):
        y = TITLE + number * ROW
        whole = width * (row.whole / max(row.whole for row in rows) if to_scale else 1.0)
        length = whole * min(row.part / row.whole, 1.0) if row.whole else 0.0
        drawn += [
            text(0, y + 13, row.label, "ink"),
            f'<rect x="{labels:.1f}" y="{y + 3}" width="{whole:.1f}" height="12" class="whole"/>',
            bar(labels, y + 3, max(length, 1.5 if row.part else 0.0), 12, row.run),
            text(round(labels + width + 8, 1), y + 13, row.told, "faint"),
        ]
    if len(rows) > len(shown):
        drawn.append(text(0, TITLE + len(shown) * ROW + 13, f"and {len(rows) - len(shown)} more", "faint"))
    return Panel(title, TITLE + ROW * (len(shown) + (len(rows) > len(shown))), drawn)


class Axes:
    """From values to places in a panel, both linear, and upwards from 0."""

    def __init__(self, first: float, last: float, high: float) -> None:
        self.first, self.last, self.high = first, max(last, first + 1), high or 1.0

    def x(self, value: float) -> float:
        part = (value - self.first) / (self.last - self.first)
        return round(PLOT_LEFT + (PANEL_WIDTH - PLOT_LEFT) * part, 1)

    def y(self, value: float) -> float:
        return round(TITLE + 8 + PLOT_HEIGHT * (1 - value / self.high), 1)

    def panel(self, title: str, drawn: list[str], unit: str) -> Panel:
        below = TITLE + 8 + PLOT_HEIGHT + 18
        grid = []
        for value in ticks(self.high):
            y = self.y(value)
            grid.append(f'<path d="M{PLOT_LEFT} {y} H{PANEL_WIDTH}" class="grid"/>')
            grid.append(text(PLOT_LEFT - 8, y + 4, f"{value:g}", "faint", "end"))
        whole = [value for value in ticks(self.last) if value >= max(self.first, 0) and value == int(value)]
        grid += [text(self.x(value), below, f"{int(value):,}", "faint", "middle") for value in whole]
        return Panel(f"{title}, {unit}", below + 4, [*grid, *drawn])


def ticks(high: float) -> list[float]:
    """About four round numbers from 0 on."""
    size = 10.0 ** math.floor(math.log10(high / 4))
    width = next(size * factor for factor in (1, 2, 5, 10) if high / (size * factor) <= 5)
    return [round(number * width, 10) for number in range(int(high / width + 1e-9) + 1)]


def bar(x: float, y: float, width: float, height: float, run: Run) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="run{run.number}"/>'


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g}"


PANELS: tuple[Callable[[Sequence[Run]], Panel | None], ...] = (
    staleness,
    lambda runs: curves(runs, "disagreement", "Disagreement between replicas"),
    lambda runs: curves(runs, "compression_error", "What the compression keeps"),
    sent,
    dropped,
    waiting,
)


def style() -> str:
    """Return the colours of plot_run, and one a run."""
    light, dark = (
        "".join(
            f".run{i} {{ fill: {pair[side]} }} .line{i} {{ stroke: {pair[side]} }}\n" for i, pair in enumerate(COLOURS)
        )
        for side in (0, 1)
    )
    return (
        f"{STYLE} text {{ font-size: 12px }} .head {{ font-weight: 600 }} path {{ stroke-width: 1.5 }}\n"
        f".whole {{ fill: #eaeef2 }}\n{light}"
        f"@media (prefers-color-scheme: dark) {{ .whole {{ fill: #21262d }}\n{dark} }}\n"
    )


def legend(runs: Iterable[Run]) -> tuple[list[str], float]:
    """Draw the runs' names beside their colours, in as many lines as they need; return where the last line ends."""
    parts, x, y = list[str](), float(EDGE), float(EDGE)
    for run in runs:
        width = 18 + len(run.name) * LETTER + 16
        if x > EDGE and x + width > WIDTH - EDGE:
            x, y = EDGE, y + ROW
        parts += [bar(x, y - 10, 12, 12, run), text(round(x + 18, 1), y, run.name, "ink")]
        x += width
    return parts, y + 14


def draw(paths: Sequence[Path]) -> str:
    """Return the picture of these run directories; each panel goes below the shorter column."""
    runs = [read(path, number) for number, path in enumerate(paths)]
    panels = [panel for make in PANELS if (panel := make(runs)) is not None]
    if not panels:
        sys.exit("these runs say nothing beside their loss: they had nobody to agree with")
    parts, top = legend(runs)
    columns = [top, top]
    for panel in panels:
        column = columns.index(min(columns))
        x, y = EDGE + column * (PANEL_WIDTH + GAP), columns[column]
        title = text(0, 14, panel.title, "ink head")
        parts.append(f'<g transform="translate({x:g} {y:g})">\n' + "\n".join([title, *panel.parts]) + "\n</g>")
        columns[column] += panel.height + GAP
    height = max(columns) - GAP + EDGE
    names = escape(", ".join(run.name for run in runs))
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
        f"<title>What {names} say beside the loss</title><style>{style()}</style>",
        f'<rect class="card" width="{WIDTH}" height="{height:g}" rx="8"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def main(words: Sequence[str]) -> None:
    """Draw the runs that all words but the last name."""
    if len(words) < 2:
        sys.exit("usage: python docs/plot_exchange.py RUN_DIRECTORY [RUN_DIRECTORY ...] PICTURE.svg")
    *paths, picture = map(Path, words)
    if len(paths) > len(COLOURS):
        sys.exit(f"{len(paths)} runs are too many to tell apart: draw at most {len(COLOURS)} in a picture")
    picture.write_text(draw(paths), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
