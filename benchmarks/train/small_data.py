"""Data too small to be divided: images in MNIST's files, learned by one process and by two workers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from harness import benchmark, commands

_CONFIG = benchmark.REPOSITORY / "configs" / "train" / "mnist.yaml"
_TIMEOUT_S = 120.0
_SIDES: dict[str, tuple[str, ...]] = {"one process": (), "two workers": ("strategy.network.data=2",)}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    epochs = 2 if options.quick else 10
    report.settings = {"rounds": rounds, "epochs": epochs, "config": "configs/train/mnist.yaml"}
    steps_s: dict[str, list[float]] = {name: [] for name in _SIDES}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in _SIDES}

    def call(name: str) -> None:
        place = options.workspace / f"{name.replace(' ', '-')}-{len(steps_s[name])}"
        command = [commands.script("orchestray"), "train", str(_CONFIG), f"train.epochs={epochs}", *_SIDES[name]]
        commands.run_command([*command, "--runs-dir", str(place), "--quiet"], _TIMEOUT_S)
        times_s = [line["time_s"] for line in commands.step_lines(place / "mnist")]
        steps_s[name].append(times_s[-1] - times_s[0])
        results[name].append(json.loads((place / "mnist" / "result.json").read_text(encoding="utf-8")))

    benchmark.alternate({name: partial(call, name) for name in _SIDES}, rounds, benchmark.say)
    for name in _SIDES:
        report.add(f"{name}: first step to last", "s", steps_s[name])
        report.add(f"{name}: the whole run", "s", [result["seconds"] for result in results[name]])
        accuracies = [result["final"]["validation"]["accuracy"] for result in results[name]]
        report.add(f"{name}: accuracy", "", accuracies)
    title = "one process / two workers, first step to last"
    report.goal(title, report.compare(title, *steps_s.values()), 1.0)
    report.notes.append(
        "600 images of 8 x 8 in MNIST's files, batches of 32; two workers on two cores take half of each batch and sum "
        "their gradients. `orchestray advise` says of such data that one process is best."
    )


if __name__ == "__main__":
    benchmark.run("small_data", "Images in MNIST's files: one process beside two workers, the same training.", measure)
