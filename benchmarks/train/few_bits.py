"""Accuracy of the digits by networks of few bits: each of the configs `configs/train/digits-*.yaml`, and none."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_KINDS = ("bnn", "twn", "dorefa", "flexpoint")
_SAME = "strategy.network.data=1"
_CONFIGS = benchmark.REPOSITORY / "configs" / "train"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seeds = options.rounds(5)
    report.settings = {"seeds": seeds, "configs": [f"digits-{kind}.yaml" for kind in _KINDS], "overrides": [_SAME]}
    found = {
        name: [_accuracy(name, changes, seed, options.workspace) for seed in range(seeds)]
        for name, changes in {"none": ["train.quantize=null"], **{kind: [] for kind in _KINDS}}.items()
    }
    for name, accuracies in found.items():
        report.add(f"accuracy: {name}", "%", [100 * each for each in accuracies])
    rows = [[name, f"{100 * statistics.mean(accuracies):.2f} %"] for name, accuracies in found.items()]
    report.table(["quantize", "mean accuracy"], rows)
    report.notes.append(
        "A run is `orchestray train configs/train/digits-QUANTIZE.yaml` with one worker; `none` is that of bnn with "
        "train.quantize=null. The configs differ in this key alone. Of 359 validation images one is 0.28 points."
    )


def _accuracy(name: str, changes: list[str], seed: int, workspace: Path) -> float:
    benchmark.say(f"{name}, seed {seed}")
    config, run = _CONFIGS / f"digits-{_KINDS[0] if name == 'none' else name}.yaml", f"{name}-{seed}"
    told = [str(config), f"train.seed={seed}", _SAME, *changes, "--name", run, "--quiet", "--runs-dir", str(workspace)]
    commands.run_command([commands.script("orchestray"), "train", *told], _TIMEOUT_S)
    result = json.loads((workspace / run / "result.json").read_text(encoding="utf-8"))
    return float(result["final"]["validation"]["accuracy"])


if __name__ == "__main__":
    benchmark.run(
        "few_bits", "Accuracy of the digits by networks of few bits, against floating-point numbers.", measure
    )
