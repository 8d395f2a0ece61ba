"""One of four workers is ten times as slow: time to a loss, for those that wait for it and those that do not."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_WORKERS = 4
_BATCH_SIZE = 64
_FACTOR = 10
_SHARE_S = 0.02
_LIMIT = 0.5
_SMOOTHED_STEPS = 20
"""A loss is the mean over this number of steps."""

_SCHEMES: dict[str, dict[str, Any]] = {
    "synchronous": {"consistency": "synchronous"},
    "asynchronous": {"consistency": "asynchronous"},
    "stale, s=4": {"consistency": "stale", "staleness": 4},
    "stale, s=4, shares by speed": {"consistency": "stale", "staleness": 4, "balance": "speed"},
    "synchronous, shares by speed": {"consistency": "synchronous", "balance": "speed"},
    "synchronous, one backup": {"consistency": "synchronous", "backup_workers": 1},
}
_STEPS = {
    "synchronous": 1.0,
    "asynchronous": 2.0,
    "stale, s=4": 1.5,
    "stale, s=4, shares by speed": 1.5,
    "synchronous, shares by speed": 1.2,
    "synchronous, one backup": 1.2,
}
"""Factor on the synchronous run's steps that each may take to get there."""
_FOR_COMPARISON = ("synchronous, shares by speed",)
"""Nothing is promised of these."""


def losses_of(scheme: str, steps: int, place: Path) -> list[tuple[float, float]]:
    """Return the seconds since the first step, and the mean loss of the steps before."""
    task = {
        "type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:TimedDigits",
        "samples_a_share": _BATCH_SIZE // _WORKERS,
    }
    config = {
        "name": "run",
        "task": {**task, "seconds_a_share": _SHARE_S},
        "train": {
            "batch_size": _BATCH_SIZE,
            "steps": steps,
            "optimizer": {"type": "sgd", "lr": 0.05},
            "validate_every_steps": steps,
        },
        "strategy": {
            "network": {"data": _WORKERS},
            "exchange": {"type": "parameter_server", **_SCHEMES[scheme]},
        },
        "allow_faults": True,
        "faults": [{"slow": f"worker/{_WORKERS - 1}", "factor": _FACTOR}],
        "checkpoint": {"every_steps": steps},
        "resources": {"cpus_per_worker": 0.25},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    lines = sorted(commands.step_lines(place / "run"), key=lambda line: int(line["step"]))
    result = json.loads((place / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["status"] == "succeeded"
    losses, began_s = [line["loss"] for line in lines], lines[0]["time_s"]
    return [
        (lines[end - 1]["time_s"] - began_s, statistics.fmean(losses[end - _SMOOTHED_STEPS : end]))
        for end in range(_SMOOTHED_STEPS, len(lines) + 1)
    ]


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(3)
    steps = 60 if options.quick else 120
    curves: dict[str, list[list[tuple[float, float]]]] = {scheme: [] for scheme in _SCHEMES}

    def call(scheme: str) -> None:
        place = options.workspace / f"{list(_SCHEMES).index(scheme)}-{len(curves[scheme])}"
        place.mkdir()
        curves[scheme].append(losses_of(scheme, int(steps * _STEPS[scheme]), place))

    benchmark.alternate({scheme: partial(call, scheme) for scheme in _SCHEMES}, rounds, benchmark.say)
    target = curves["synchronous"][0][-1][1]
    times: dict[str, list[float]] = {scheme: [] for scheme in _SCHEMES}
    for scheme, runs in curves.items():
        for run in runs:
            reached = [at_s for at_s, loss in run if loss <= target]
            if not reached:
                raise benchmark.BenchmarkError(f"{scheme} did not come to a loss of {target:.4f}: {run[-1]}")
            times[scheme].append(reached[0])
        report.add(f"{scheme}: time to the loss", "s", times[scheme])
    for scheme in _SCHEMES:
        if scheme != "synchronous":
            name = f"{scheme}: time to the loss / synchronous"
            ratio = report.compare(name, times[scheme], times["synchronous"])
            if scheme not in _FOR_COMPARISON:
                report.goal(name, ratio, _LIMIT)
    report.settings = {
        "rounds": rounds,
        "workers": _WORKERS,
        "factor": _FACTOR,
        "seconds_a_share": _SHARE_S,
        "steps": steps,
        "loss": target,
    }
    report.notes += [
        (
            f"A worker sleeps {_SHARE_S:g} s for an even share of a batch, {_BATCH_SIZE // _WORKERS} samples, and in "
            f"proportion for any other; the slow one {_FACTOR} times as long."
        ),
        f"The loss is the mean over {_SMOOTHED_STEPS} steps; the one to come to is that of the synchronous run's end.",
        (
            "Under `stale` every worker computes a share of every batch: the others may be ahead by the bound, and, "
            "with even shares, in the long run go as fast as the slowest. It evens out delays that come and go; a "
            "lasting straggler needs a smaller share, as `balance: speed` gives it."
        ),
    ]


if __name__ == "__main__":
    benchmark.run(
        "straggler",
        "Time to a loss with one of four workers ten times as slow: asynchronous, stale, by speed, with a backup.",
        measure,
    )
