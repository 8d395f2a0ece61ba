"""Draw the loss of a run as SVG, from its run directory alone: `python docs/plot_run.py runs/digits digits.svg`.

Needs nothing but Python: `metrics.jsonl` and `events.jsonl` are lines of JSON.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 56, 44
SMOOTHING = 0.9
STYLE = """
  .card { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #656d76 } .grid { stroke: #d8dee4 }
  .train { stroke: #0969da } .train-ink { fill: #0969da } .lost { stroke: #cf222e } .lost-ink { fill: #cf222e }
  .validation { stroke: #bc4c00 } .validation-ink { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #8d96a0 } .grid { stroke: #30363d }
    .train { stroke: #4493f8 } .train-ink { fill: #4493f8 } .lost { stroke: #f85149 } .lost-ink { fill: #f85149 }
    .validation { stroke: #f0883e } .validation-ink { fill: #f0883e }
  }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .title { font-size: 16px; font-weight: 600 } path { fill: none; stroke-linejoin: round }
"""

Points = list[tuple[float, float]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def smoothed(points: Points) -> Points:
    """Return the exponential moving average, without the pull of its start."""
    result, mean = Points(), 0.0
    for number, (step, loss) in enumerate(points, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        result.append((step, mean / (1 - SMOOTHING**number)))
    return result


class Axes:
    """From steps and losses to places in the picture: steps to the right, the logarithm of the loss upwards."""

    def __init__(self, points: Points) -> None:
        losses = [loss for _, loss in points]
        self.last = max(step for step, _ in points)
        self.low, self.high = math.log10(min(losses)), math.log10(max(losses))
        margin = 0.04 * (self.high - self.low) or 0.5
        self.low, self.high = self.low - margin, self.high + margin

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / self.last, 1)

    def y(self, loss: float) -> float:
        part = (math.log10(loss) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part, 1)

    def path(self, points: Points, style: str) -> str:
        places = " L".join(f"{self.x(step)} {self.y(loss)}" for step, loss in points)
        return f'<path d="M{places}" {style}/>'

    def grid(self) -> list[str]:
        decades = range(math.ceil(self.low), math.floor(self.high) + 1)
        losses = [10.0**decade * factor for decade in decades for factor in ((1, 3) if len(decades) < 3 else (1,))]
        parts = []
        for loss in losses:
            if math.log10(loss) <= self.high:
                y = self.y(loss)
                parts.append(f'<path d="M{LEFT} {y} H{WIDTH - RIGHT}" class="grid"/>')
                parts.append(text(LEFT - 10, y + 4, f"{loss:g}", "faint", "end"))
        below = HEIGHT - BOTTOM + 20
        parts += [text(self.x(step), below, f"{step:,}", "faint", "middle") for step in ticks(self.last)]
        return [*parts, text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step", "faint", "middle")]


def ticks(last: float) -> list[int]:
    """About five round numbers from 0 on."""
    size = 10 ** math.floor(math.log10(max(last / 5, 1)))
    width = int(next(size * factor for factor in (1, 2, 5, 10) if last / (size * factor) <= 6))
    return list(range(0, int(last) + 1, width))


def text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(content)}</text>'


def labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> list[str]:
    """Draw the curves' names at their right ends, kept apart."""
    parts, lowest = [], -math.inf
    for loss, name, style in sorted(ends, key=lambda end: -end[0]):
        lowest = max(axes.y(loss) + 4, lowest + 17)
        parts.append(text(WIDTH - RIGHT + 10, lowest, name, style))
    return parts


def draw(run: Path) -> str:
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["loss"] > 0]
    train = [(line["step"], line["loss"]) for line in lines if "split" not in line]
    validation = [(line["step"], line["loss"]) for line in lines if "split" in line]
    events = read_lines(run / "events.jsonl")
    axes, mean = Axes(train + validation), smoothed(train)
    workers = next((event["workers"] for event in events if "workers" in event), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>Loss of the run {escape(run.resolve().name)}</title><style>{STYLE}</style>",
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        text(LEFT, 30, f"{run.resolve().name}: loss by step, {workers} worker{'s' * (workers > 1)}", "ink title"),
        *axes.grid(),
        axes.path(train, 'class="train" stroke-opacity="0.3"'),
    ]
    lost = [event for event in events if event["event"] == "worker_lost"]
    for loss, recovery in zip(lost, (e for e in events if e["event"] == "recovered"), strict=False):
        x = axes.x(recovery["step"])
        parts.append(f'<path d="M{x} {TOP} V{HEIGHT - BOTTOM}" class="lost" stroke-dasharray="4 4"/>')
        parts.append(text(x + 8, TOP + 10, f"worker {loss['rank']} killed, replaced", "lost-ink"))
    parts.append(axes.path(mean, 'class="train" stroke-width="2"'))
    ends = [(mean[-1][1], "training", "train-ink")]
    if validation:
        parts.append(axes.path(validation, 'class="validation" stroke-width="2"'))
        ends.append((validation[-1][1], "validation", "validation-ink"))
    return "\n".join([*parts, *labels(axes, ends), "</svg>"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/plot_run.py RUN_DIRECTORY PICTURE.svg")
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])), encoding="utf-8")
