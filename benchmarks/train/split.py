"""Cuts of a pipeline: `split: balanced`, which measures the layers, against `split: equal`, which counts them."""

from __future__ import annotations

import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_WARM_UP_STEPS = 10
_MICRO_BATCHES = 8
_SPEEDUP = 1.2
_SPLITS = ("balanced", "equal")
_MODELS: dict[str, dict[str, Any]] = {"heavy first": {"heavy": "first"}, "heavy last": {"heavy": "last"}}


def train(spec: dict[str, Any], split: str, place: Path) -> dict[str, Any]:
    """Train through the command line; seconds of the steps, what the workers did, and where the run is."""
    config = {
        "name": "run",
        "task": spec["task"],
        # Validation and checkpoints once, after the last step.
        "train": {**spec["train"], "validate_every_steps": spec["train"]["steps"]},
        "strategy": {"network": {**spec["network"], "split": split}},
        "checkpoint": {"every_steps": spec["train"]["steps"]},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    times = [line["time_s"] for line in commands.step_lines(place / "run")]
    result = json.loads((place / "run" / "result.json").read_text(encoding="utf-8"))
    return {
        "steps_s": [b - a for a, b in pairwise(times[_WARM_UP_STEPS - 1 :])],
        "busy_s": result["busy_s"],
        "bubble": result["bubble"],
        "path": str(place / "run"),
    }


def add_options(parser: Any) -> None:
    parser.add_argument("--only", nargs="+", choices=tuple(_MODELS), default=tuple(_MODELS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=None, help="of a run")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(3)
    steps = options.arguments.steps or (20 if options.quick else 30)
    spec: dict[str, Any] = {
        "train": {"batch_size": 512, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.01}, "seed": 0},
        "network": {"pipeline": 2, "schedule": "1f1b", "microbatches": _MICRO_BATCHES},
    }
    report.settings = {"rounds": rounds, "threads_a_worker": 1, "warm_up_steps_left_out": _WARM_UP_STEPS, **spec}
    for model in options.arguments.only:
        arguments = {**_MODELS[model]}
        report.settings[model] = {"type": "uneven.py:Uneven", **arguments}
        task = {"type": f"{benchmark.FOLDER / 'train' / 'uneven.py'}:Uneven", **arguments}
        _measure_model(report, options, model, {**spec, "task": task}, rounds)
    report.notes += [
        "Both sides are the whole of `orchestray train`; they differ in `strategy.network.split` alone.",
        "The model has 6 fully connected layers of 1024 x 1024, and 18 of mostly 64 x 64 after or before them.",
        "A run's step time is the median of the differences between the ends of its steps.",
        "Wherever a pipeline is cut, the weights are the same: tensors that differ in a bit are counted.",
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in _SPLITS}

    def call(split: str) -> None:
        place = options.workspace / f"{model.replace(' ', '-')}-{split}-{len(found[split])}"
        place.mkdir()
        found[split].append(train(spec, split, place))

    sides = {split: partial(call, split) for split in _SPLITS}
    benchmark.alternate(sides, rounds, lambda text: benchmark.say(f"{model}, {text}"))
    medians = {}
    for split, runs in found.items():
        times = [statistics.median(run["steps_s"]) * 1e3 for run in runs]
        medians[split] = report.add(f"{model}: split {split}", "ms", times).values
        report.details[f"{model}: {split}, every step in ms"] = [
            [round(1e3 * step_s, 3) for step_s in run["steps_s"]] for run in runs
        ]
        report.details[f"{model}: {split}, seconds each worker was busy"] = [run["busy_s"] for run in runs]
        report.add(f"{model}: split {split}, bubble", "%", [100 * run["bubble"] for run in runs])
    ratio = report.compare(f"{model}: balanced / equal", medians["balanced"], medians["equal"])
    report.goal(f"{model}: step of balanced / equal (1 / {_SPEEDUP:g})", ratio, 1 / _SPEEDUP)
    report.goal(f"{model}: tensors that differ in a bit", _num_different(found), 0.0)


def _num_different(found: dict[str, list[dict[str, Any]]]) -> float:
    """Count the tensors of the trained models that differ, over the runs of both sides."""
    import torch

    from orchestray.platform.run.model_files import load_model_tensors

    wanted, *others = [load_model_tensors(Path(run["path"]) / "model") for runs in found.values() for run in runs]
    return float(sum(not torch.equal(wanted[name], each[name]) for each in others for name in wanted))


if __name__ == "__main__":
    benchmark.run(
        "split",
        "Step time of a pipeline over layers of unlike cost: cut where the layers were measured, or counted.",
        measure,
        add_options,
    )
