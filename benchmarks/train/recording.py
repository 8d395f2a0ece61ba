"""Cost to the training loop of recording one step of metrics: ours in a gang, `ray.train.report` beside it."""

from __future__ import annotations

import json
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 240.0
_PER_SECOND = 5000
_WARM_REPORTS = 2  # Ray Train's first two come back at once: its queues are empty


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(2)
    spec: dict[str, Any] = {
        "per_second": _PER_SECOND,
        "paced_lines": _PER_SECOND * (2 if options.quick else 5),
        "flood_lines": 5_000 if options.quick else 20_000,
        "reports": 4 if options.quick else 8,
    }
    report.settings = {"rounds": rounds, "workers": 2, **spec}
    ours: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []

    def call(kind: str, found: list[dict[str, Any]]) -> None:
        place = options.workspace / f"{kind.rpartition('/')[2]}-{len(found)}"
        place.mkdir()
        told = commands.write_json(place / "spec.json", {**spec, "runs_dir": str(place), "storage": str(place)})
        out = place / "out.json"
        commands.run_command(commands.python(str(benchmark.FOLDER / f"{kind}.py"), str(told), str(out)), _TIMEOUT_S)
        found.append(json.loads(out.read_text(encoding="utf-8")))

    sides = {
        "ours": lambda: call("train/ours/record", ours),
        "ray.train.report": lambda: call("harness/peers/ray_report", peers),
    }
    benchmark.alternate(sides, rounds, benchmark.say)

    paced = [1e6 * s for found in ours for s in found["paced"]["taken_s"]]
    flood = [1e6 * s for found in ours for s in found["flood"]["taken_s"]]
    steady = [1e6 * s for found in peers for s in found["taken_s"][_WARM_REPORTS:]]
    us = report.add(f"ours, a line at {_PER_SECOND}/s", "us", _thinned(paced))
    report.add(f"ours, 99th of 100 lines at {_PER_SECOND}/s", "us", [_percentile(paced, 0.99)])
    report.add("ours, the longest", "us", [max(paced)])
    report.add("ours, a line as fast as the loop can", "us", _thinned(flood))
    report.add("ours, lines a second when paced", "1/s", [found["paced"]["per_second"] for found in ours])
    report.add("ours, lines a second as fast as the loop can", "1/s", [found["flood"]["per_second"] for found in ours])
    lost = report.add("ours, lines lost or written twice", "lines", [f["lost"] + f["twice"] for f in ours])
    report.add("ray.train.report, from the third on", "us", steady)
    report.compare("a line / ray.train.report", _thinned(paced), steady)
    report.goal("recording a step", us.median, 50.0, "us")
    report.goal("lines lost or written twice", max(lost.values), 0.0, "lines")
    report.goal("lines out of order", float(sum(not found["in_order"] for found in ours)), 0.0, "runs")
    report.notes += [
        (
            "Ours: two actors of a gang record a line a step (the dictionary is put together inside the time), a "
            "driver drains rank 0 and writes metrics.jsonl and TensorBoard, as in a run. Lost lines are counted in "
            "metrics.jsonl."
        ),
        "Ray Train: as it comes, two workers, no checkpoint; the first two reports, which come at once, are left out.",
        "The numbers listed are every 50th line of all; percentile and longest are of all.",
    ]


def _thinned(values: list[float]) -> list[float]:
    return values[::50]


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


if __name__ == "__main__":
    benchmark.run(
        "recording", "What recording one step of metrics costs the training loop, beside `ray.train.report`.", measure
    )
