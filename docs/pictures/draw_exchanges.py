"""Draws exchanges.svg from benchmarks/results/: `PYTHONPATH=benchmarks python docs/pictures/draw_exchanges.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from exchange.exchanges import draw

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "exchanges.json"
UNITS = {"accuracy": 1e-2, "sent": 1e6}
"""What the units of the result are worth: per cent, and megabytes."""

runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
for measured in json.loads(RESULT.read_text(encoding="utf-8"))["measurements"]:
    name, _, what = measured["name"].rpartition(", ")
    if what in UNITS:
        runs[name] = runs[name] or [{} for _ in measured["values"]]
        for run, value in zip(runs[name], measured["values"], strict=True):
            run[what] = value * UNITS[what]
draw(runs)
