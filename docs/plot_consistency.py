"""Draw the spectrum of consistency as SVG, from the results of a benchmark alone.

    python docs/plot_consistency.py benchmarks/results/exchanges.json docs/pictures/consistency.svg

Needs nothing but Python.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plot_gallery import EDGE, picture
from plot_run import text

SPECTRUM = (
    ("All wait for all, at every step", ("all-reduce", "servers, synchronous")),
    ("Nobody is far ahead", ("servers, stale by 4",)),
    ("Nobody waits", ("servers, asynchronous", "Downpour, push and fetch 4", "shared memory (HOGWILD)")),
    ("Each agrees with one other", ("gossip, random pairs",)),
    ("All meet now and then", ("elastic averaging, every 8", "local SGD, every 16", "DiLoCo, every 50")),
    ("All meet once, or never", ("average at the end", "ensemble of 2")),
)
"""Schemes from the most consistent one on, in groups."""
LEFT, RIGHT, SENT, STALE = 230, 500, 600, 715
TOP, ROW, DOT = 88, 24, 5
LOW, HIGH = 92, 97
"""Ends of the axis of accuracies, in percent."""


def x(accuracy: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * (accuracy - LOW) / (HIGH - LOW), 1)


def draw(result: Mapping[str, Any]) -> str:
    """Return the picture: a row a scheme, with its accuracy over seeds, its bytes and its staleness."""
    measured = {one["name"]: one for one in result["measurements"]}
    staleness = {row[0]: row[5] for row in result["tables"][0]["rows"]}
    parts = [
        text(LEFT, 56, "validation accuracy, %", "faint"),
        text(SENT, 56, "sent", "faint", "end"),
        text(STALE, 56, "updates late", "faint", "end"),
    ]
    rows, y = [], TOP
    for group, schemes in SPECTRUM:
        rows.append(text(EDGE, y + 4, group, "faint"))
        y += ROW
        for name in schemes:
            accuracy, sent = measured[f"{name}, accuracy"], measured[f"{name}, sent"]["median"]
            middle, said = x(accuracy["median"]), f"{accuracy['median']:.1f} %"
            rows += [
                text(EDGE + 12, y + 4, name, "ink"),
                f'<path class="train" d="M{x(accuracy["min"])} {y}H{x(accuracy["max"])}" stroke-width="2"/>',
                f'<circle class="train-ink" cx="{middle}" cy="{y}" r="{DOT}"><title>{said}</title></circle>',
                text(SENT, y + 4, f"{sent:,.0f} MB" if sent >= 1 or not sent else f"{1e3 * sent:.0f} kB", "ink", "end"),
                text(STALE, y + 4, staleness[name].partition(",")[0].strip("-"), "ink", "end"),
            ]
            y += ROW
    for accuracy in range(LOW, HIGH + 1):
        parts += [
            f'<path class="grid" d="M{x(accuracy)} 70V{y - ROW / 2}"/>',
            text(x(accuracy), y + 8, str(accuracy), "faint", "middle"),
        ]
    return picture("From consistent to independent: one training under twelve schemes", y + 28, [*parts, *rows])


def main(words: Sequence[str]) -> None:
    if len(words) != 2:
        sys.exit(__doc__)
    results, drawing = map(Path, words)
    drawing.write_text(draw(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
