"""Draw what runs did, as SVG, from their directories alone; docs/gallery.md has the pictures.

    python docs/plot_gallery.py losses runs/digits-krum runs/digits-mean picture.svg
    python docs/plot_gallery.py timeline runs/digits-pipeline-1f1b runs/digits-pipeline-zero-bubble picture.svg
    python docs/plot_gallery.py lineage runs/digits-evolution picture.svg

`losses` compares the losses of runs, with what was lost and replaced on the way; `timeline` shows who computed what and
when in the last step of pipelines; `lineage` shows the trials of a search, each with a line to its parent. Needs
nothing but Python.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from plot_exchange import COLOURS
from plot_run import BOTTOM, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, Axes, labels, read_lines, smoothed, text, ticks

EVENTS = {
    "worker_lost": "{role} {rank} is lost",
    "server_taken_over": "its copy takes over",
    "worker_replaced": "another one starts",
}
LANE, LANE_GAP, TITLE, EDGE = 22, 4, 30, 24
LABEL_WIDTH = 76
DOT = 4


def coloured() -> str:
    """Return the style of the pictures, with a class for each of the colours."""
    light = "".join(f".fill{n} {{ fill: {one} }} .stroke{n} {{ stroke: {one} }} " for n, (one, _) in enumerate(COLOURS))
    dark = "".join(f".fill{n} {{ fill: {one} }} .stroke{n} {{ stroke: {one} }} " for n, (_, one) in enumerate(COLOURS))
    return f"{STYLE} {light} @media (prefers-color-scheme: dark) {{ {dark} }}"


def picture(title: str, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
            f"<title>{escape(title)}</title><style>{coloured()}</style>",
            f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
            text(EDGE, 30, title, "ink title"),
            *parts,
            "</svg>\n",
        )
    )


def happened(run: Path) -> list[tuple[int, str]]:
    """Return the step and a sentence for each loss and replacement of a run."""
    step, found = 0, list[tuple[int, str]]()
    for event in read_lines(run / "events.jsonl"):
        step = event.get("at_step", event.get("step", step))
        if (sentence := EVENTS.get(event["event"])) is not None:
            found.append((step, sentence.format(**event).replace("_", " ")))
    return found


def losses(runs: Sequence[Path]) -> str:
    curves = [
        [(line["step"], line["loss"]) for line in read_lines(run / "metrics.jsonl") if "split" not in line]
        for run in runs
    ]
    curves = [smoothed([point for point in curve if point[1] > 0]) for curve in curves]
    axes = Axes([point for curve in curves for point in curve])
    parts, ends = axes.grid(), []
    for number, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        below = TOP + 12
        for step, sentence in happened(run):
            x = axes.x(step)
            parts.append(f'<path d="M{x} {TOP} V{HEIGHT - BOTTOM}" class="lost" stroke-dasharray="4 4"/>')
            parts.append(text(x + 8, below, sentence, "lost-ink"))
            below += 18
        parts.append(axes.path(curve, f'class="stroke{number}" stroke-width="2"'))
        ends.append((curve[-1][1], run.name.removeprefix("digits-"), f"fill{number}"))
    if len(runs) == 1:
        return picture(f"{runs[0].name}: training loss by step", HEIGHT, parts)
    return picture("Training loss by step", HEIGHT, [*parts, *labels(axes, ends)])


def timeline(runs: Sequence[Path]) -> str:
    steps = [json.loads((run / "timeline.json").read_text(encoding="utf-8"))["steps"][-1] for run in runs]
    spans = [max(one["end_s"] for one in step["actions"]) - begin_of(step) for step in steps]
    scale = (WIDTH - 2 * EDGE - LABEL_WIDTH) / max(spans)
    kinds = sorted({one["kind"] for step in steps for one in step["actions"]})
    parts, y = [], 60.0
    for place, kind in enumerate(kinds):
        parts.append(f'<rect x="{EDGE + 130 * place}" y="{y - 12}" width="12" height="12" class="fill{place}"/>')
        parts.append(text(EDGE + 130 * place + 18, y - 2, KINDS.get(kind, kind), "faint"))
    for run, step, span in zip(runs, steps, spans, strict=True):
        y += TITLE
        parts.append(text(EDGE, y, f"{run.name}: a step of {1e3 * span:.1f} ms", "ink"))
        y += 10
        ranks = sorted({one["rank"] for one in step["actions"]})
        for lane, rank in enumerate(ranks):
            parts.append(text(EDGE, y + lane * (LANE + LANE_GAP) + 15, f"worker {rank}", "faint"))
        for one in step["actions"]:
            x = EDGE + LABEL_WIDTH + scale * (one["begin_s"] - begin_of(step))
            top = y + ranks.index(one["rank"]) * (LANE + LANE_GAP)
            width = max(0.8, scale * (one["end_s"] - one["begin_s"]))
            kind = kinds.index(one["kind"])
            parts.append(f'<rect x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" height="{LANE}" class="fill{kind}"/>')
        y += len(ranks) * (LANE + LANE_GAP)
    return picture("Who computes when in a step", y + 16, parts)


KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def begin_of(step: dict[str, Any]) -> float:
    return float(min(one["begin_s"] for one in step["actions"]))


def lineage(runs: Sequence[Path]) -> str:
    (run,) = runs
    nodes = {line["trial"]: line for line in read_lines(run / "lineage.jsonl")}
    value = {
        line["trial"]: line["objective"]
        for line in read_lines(run / "trials.jsonl")
        if line["objective"] is not None and line["trial"] in nodes
    }
    best = max(value, key=lambda trial: value[trial])
    low, high = min(value.values()), max(value.values())

    def place(trial: int) -> tuple[float, float]:
        right, up = trial / max(value), (value[trial] - low) / (high - low or 1.0)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * right, 1), round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * up, 1)

    parts = [text(place(0)[0] + (WIDTH - LEFT - RIGHT) * tick / max(value), HEIGHT - 24, str(tick), "faint", "middle")
             for tick in ticks(max(value))]  # fmt: skip
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "trial", "faint", "middle"))
    parts += [
        text(LEFT - 14, y, f"{number:.3g}", "faint", "end") for y, number in ((HEIGHT - BOTTOM, low), (TOP, high))
    ]
    ancestors = {best}
    while (parent := nodes[min(ancestors)]["parent"]) is not None:
        ancestors.add(parent)
    for trial in sorted(value, key=lambda trial: trial in ancestors):
        parent, (x, y) = nodes[trial]["parent"], place(trial)
        if parent in value:
            px, py = place(parent)
            style = 'class="stroke1" stroke-width="2"' if trial in ancestors else 'class="grid"'
            parts.append(f'<path d="M{px} {py} C{(px + x) / 2} {py} {(px + x) / 2} {y} {x} {y}" {style}/>')
        parts.append(f'<circle cx="{x}" cy="{y}" r="{DOT}" class="fill{int(trial in ancestors)}"/>')
    x, y = place(best)
    parts.append(text(x + 10, y + 5, f"{value[best]:.4f}", "fill1"))
    return picture(f"{run.name}: the trials, their parents, and the ancestors of the best", HEIGHT, parts)


PICTURES: dict[str, Callable[[Sequence[Path]], str]] = {"losses": losses, "timeline": timeline, "lineage": lineage}

if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in PICTURES:
        sys.exit(f"usage: python docs/plot_gallery.py {'|'.join(PICTURES)} RUN_DIRECTORY... PICTURE.svg")
    Path(sys.argv[-1]).write_text(PICTURES[sys.argv[1]]([Path(one) for one in sys.argv[2:-1]]), encoding="utf-8")
