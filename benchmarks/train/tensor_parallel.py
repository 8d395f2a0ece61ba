"""Layers split over two workers: ours against DTensor under torchrun, and against one process, in turns."""

from __future__ import annotations

import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import benchmark, commands
from harness.same_training import COMPARED_STEPS, LOSS_TOLERANCE, check_same_training

_TIMEOUT_S = 300.0
_WARM_UP_STEPS = 10
_WORKERS = 2
_LIMIT = 1.05

_MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp"},
        "batch_size": 64,
        "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9},
        "seed": 0,
    },
    "transformer": {
        "task": {"type": "python_source", "context": 64, "width": 128, "depth": 4, "heads": 4},
        "batch_size": 64,
        "optimizer": {"type": "adamw", "lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.01},
        "seed": 0,
    },
}
_OURS, _TRAIN, _PEER, _SINGLE = "ours", "orchestray train", "DTensor", "one process"


def by_torchrun(script: str, num_processes: int, spec: dict[str, Any], place: Path) -> dict[str, Any]:
    told, out = commands.write_json(place / "spec.json", spec), place / "out.json"
    command = [commands.script("torchrun"), "--standalone", "--nproc-per-node", str(num_processes)]
    commands.run_command([*command, script, str(told), str(out)], _TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def by_command(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    """Train through the command line; times and losses of the steps as the run directory has them."""
    config = {
        "name": "run",
        "task": spec["task"],
        # Validation and checkpoints once, after the last step: the peer has neither.
        "train": {
            **{key: spec[key] for key in ("batch_size", "steps", "optimizer", "seed")},
            "validate_every_steps": spec["steps"],
        },
        "strategy": {"network": {"tensor": _WORKERS}},
        "checkpoint": {"every_steps": spec["steps"]},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    lines = commands.step_lines(place / "run")
    return {"times": [line["time_s"] for line in lines], "losses": [line["loss"] for line in lines]}


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=None, help="of a run")
    parser.add_argument("--no-command", action="store_true", help="leave `orchestray train` out")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(2)
    steps = options.arguments.steps or (25 if options.quick else 40)
    report.settings = {"rounds": rounds, "workers": _WORKERS, "threads_a_worker": 1, "steps": steps}
    report.settings["warm_up_steps_left_out"] = _WARM_UP_STEPS
    for model in options.arguments.models:
        _measure_model(report, options, model, {**_MODELS[model], "model": model, "steps": steps}, rounds)
    report.notes += [
        (
            "`ours` and `DTensor` are the same script under torchrun but for who splits the layers: the same pairs of "
            "layers, data in memory, no driver, no records. `orchestray train` is the whole command: data plane, a "
            "metric line a step, a driver."
        ),
        (
            "All train the same: model, initial weights, order of samples, batch and optimizer; the losses of the "
            f"first {COMPARED_STEPS} steps are compared on every round (tolerance {LOSS_TOLERANCE:g})."
        ),
        "`one process` is plain PyTorch with one thread.",
        "A run's step time is the median of the differences between the ends of its steps.",
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    ours, peer = str(benchmark.FOLDER / "train" / "ours" / "tensor_parallel.py"), commands.peer("dtensor")
    sides = {
        _OURS: partial(by_torchrun, ours, _WORKERS, spec),
        _TRAIN: partial(by_command, spec),
        _PEER: partial(by_torchrun, peer, _WORKERS, spec),
        _SINGLE: partial(by_torchrun, peer, 1, spec),
    }
    if options.arguments.no_command:
        del sides[_TRAIN]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{name.replace(' ', '-')}-{len(found[name])}"
        place.mkdir()
        found[name].append(sides[name](place))

    benchmark.alternate(
        {name: partial(call, name) for name in sides}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    check_same_training(model, found, _SINGLE)
    medians = {}
    for name, runs in found.items():
        steps = [[1e3 * (b - a) for a, b in pairwise(run["times"][_WARM_UP_STEPS - 1 :])] for run in runs]
        medians[name] = report.add(f"{model}: {name}", "ms", [statistics.median(run) for run in steps]).values
        report.details[f"{model}: {name}, every step in ms"] = [[round(step, 3) for step in run] for run in steps]
    report.add(f"{model}: ours, sent by a worker in a step", "bytes", [run["bytes"] for run in found[_OURS]])
    report.settings[model] = {key: spec[key] for key in ("task", "batch_size", "optimizer")}
    report.settings[model]["task"] = {**spec["task"], "type": spec["task"]["type"].rpartition("/")[2]}
    report.details[f"{model}: plan"] = found[_OURS][0]["plan"]
    for name in (_OURS, _TRAIN):
        if name in medians:
            ratio = report.compare(f"{model}: {name} / DTensor", medians[name], medians[_PEER])
            report.goal(f"{model}: step of {name} / DTensor", ratio, _LIMIT)
    report.compare(f"{model}: ours / one process", medians[_OURS], medians[_SINGLE])


if __name__ == "__main__":
    benchmark.run(
        "tensor_parallel",
        "Step time of layers split over two workers: ours against DTensor under torchrun, and one process.",
        measure,
        add_options,
    )
