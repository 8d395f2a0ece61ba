"""An asynchronous parameter server: ours in plain processes against the one of Ray's documentation, in turns."""

from __future__ import annotations

import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 240.0
_WORKERS = 2
_WIDTH = 1448
"""Two square matrices of it are 16 MB of float32."""
_LIMIT, _SHARED_LIMIT = 1 / 5, 1 / 10
_SPEC = {"workers": _WORKERS, "width": _WIDTH, "samples": 4, "lr": 0.01, "overlap": False}


def run_side(script: str, spec: dict[str, Any], place: Path) -> list[float]:
    """Return the seconds from the first update to each."""
    told, out = commands.write_json(place / "spec.json", spec), place / "out.json"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(benchmark.FOLDER)}
    commands.run_command(commands.python(script, str(told), str(out)), _TIMEOUT_S, environment)
    found: list[float] = json.loads(out.read_text(encoding="utf-8"))["times"]
    return found


def run_shared(spec: dict[str, Any], place: Path) -> list[float]:
    """Return the seconds from the first update to each, by `orchestray train` with workers that share the memory.

    Two updates a step, one a worker; the steps are timed.
    """
    samples = spec["workers"] * spec["samples"]
    steps = spec["updates"] // spec["workers"]
    config = {
        "name": "run",
        "task": {
            "type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Wide",
            "width": spec["width"],
            "num_samples": samples * 16,
        },
        "train": {
            "batch_size": samples,
            "steps": steps,
            "optimizer": {"type": "sgd", "lr": spec["lr"]},
            "validate_every_steps": steps,
        },
        "strategy": {
            "network": {"data": spec["workers"]},
            "exchange": {"type": "parameter_server", "consistency": "asynchronous", "transport": "shared_memory"},
        },
        "checkpoint": {"every_steps": steps},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    at = [line["time_s"] for line in commands.step_lines(place / "run")]
    begins = [at[0], *at[:-1]]
    return [
        begin + (end - begin) * (part + 1) / spec["workers"]
        for begin, end in zip(begins, at, strict=True)
        for part in range(spec["workers"])
    ]


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    updates, warm_up = (30, 10) if options.quick else (120, 20)
    ours = str(benchmark.FOLDER / "train" / "ours" / "parameter_server.py")
    peer = commands.peer("ray_parameter_server")
    # The peer's driver never stops its workers: it goes on while they compute, and is measured on fewer updates.
    sides = {
        "ours": partial(run_side, ours, {**_SPEC, "updates": 4 * updates}),
        "ours, overlapped": partial(run_side, ours, {**_SPEC, "updates": 4 * updates, "overlap": True}),
        "ours, shared memory": partial(run_shared, {**_SPEC, "updates": 4 * updates}),
        "Ray's documentation": partial(run_side, peer, {**_SPEC, "updates": updates}),
    }
    report.settings = {"rounds": rounds, "updates": updates, "warm_up": warm_up, **_SPEC}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{len(taken[name])}-{list(sides).index(name)}"
        place.mkdir()
        times = sides[name](place)[warm_up:]
        taken[name].append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
        rates[name].append(1e3 / taken[name][-1])
        report.details.setdefault(name, []).append(
            {"median_ms": 1e3 * statistics.median(b - a for a, b in pairwise(times)), "updates": len(times)}
        )

    benchmark.alternate({name: partial(call, name) for name in sides}, rounds, benchmark.say)
    for name in sides:
        report.add(f"{name}: updates a second", "1/s", rates[name])
        report.add(f"{name}: time an update", "ms", taken[name])
    for name in list(sides)[:-1]:
        ratio = report.compare(f"{name}: time an update / Ray's documentation", taken[name], taken[list(sides)[-1]])
        limit = _SHARED_LIMIT if "shared" in name else _LIMIT
        report.goal(f"{name}: time an update / Ray's documentation", ratio, limit)
    report.notes += [
        "Both sides compute the same gradients of the same model and make one update of plain SGD for each.",
        "One thread a process on both sides. Ours are a server and two workers, Ray's those and the driver.",
        "`ours, shared memory` is the whole of `orchestray train`: samples, a coordinator, a metric line a step.",
    ]


if __name__ == "__main__":
    benchmark.run(
        "parameter_server",
        "Updates a second of an asynchronous parameter server, two workers, 16 MB: ours against Ray's documentation.",
        measure,
    )
