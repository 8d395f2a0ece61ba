"""Five layers on five workers, each of which waits for the one before, beside one process that computes all."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from harness import benchmark, commands

_CONFIG = benchmark.REPOSITORY / "configs" / "train" / "digits-pipeline-naive.yaml"
_TIMEOUT_S = 120.0
_WIDTH, _WORKERS, _MICRO_BATCHES = 512, 5, 8
_ONE, _FIVE = "one process", "a layer a worker"
_SIDES: dict[str, tuple[str, ...]] = {
    _ONE: ("strategy.network={}", f"train.accumulate={_MICRO_BATCHES}"),
    _FIVE: (),
}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(3)
    epochs = 1 if options.quick else 3
    report.settings = {"rounds": rounds, "epochs": epochs, "width": _WIDTH, "workers": _WORKERS}
    report.settings["config"] = "configs/train/digits-pipeline-naive.yaml"
    steps_s: dict[str, list[float]] = {name: [] for name in _SIDES}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in _SIDES}

    def call(name: str) -> None:
        place = options.workspace / f"{name.replace(' ', '-')}-{len(steps_s[name])}"
        widths = f"task.hidden={[_WIDTH] * (_WORKERS - 1)}"
        command = [commands.script("orchestray"), "train", str(_CONFIG), f"train.epochs={epochs}", widths]
        commands.run_command([*command, *_SIDES[name], "--runs-dir", str(place), "--quiet"], _TIMEOUT_S)
        times_s = [line["time_s"] for line in commands.step_lines(place / "digits-pipeline-naive")]
        steps_s[name].append(times_s[-1] - times_s[0])
        found = json.loads((place / "digits-pipeline-naive" / "result.json").read_text(encoding="utf-8"))
        results[name].append(found)

    benchmark.alternate({name: partial(call, name) for name in _SIDES}, rounds, benchmark.say)
    for name in _SIDES:
        report.add(f"{name}: first step to last", "s", steps_s[name])
        losses = [result["final"]["validation"]["loss"] for result in results[name]]
        report.add(f"{name}: validation loss", "", losses)
    report.add(f"{_FIVE}: part of the time in which a worker computes", "", [1 - r["bubble"] for r in results[_FIVE]])
    title = f"{_ONE} / {_FIVE}, first step to last"
    report.goal(title, report.compare(title, steps_s[_ONE], steps_s[_FIVE]), 1.0)
    report.notes.append(
        f"Fully connected layers of {_WIDTH} on the digits, in batches of 64 and {_MICRO_BATCHES} micro-batches, which "
        "both compute one after the other. Four workers always wait for the fifth: the layers have five processes and "
        "no gain. A schedule of a pipeline has that (`benchmarks pipeline`)."
    )


if __name__ == "__main__":
    benchmark.run("naive_split", "Five layers on five workers without a pipeline: one process beside them.", measure)
