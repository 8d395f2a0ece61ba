"""Step time of two replicas: `orchestray train` against the same training under torchrun and DDP, in turns."""

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
_LIMIT = 1.03

_MLP = {
    "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp"},
    "batch_size": 64,
    "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9},
    "seed": 0,
}
_TRANSFORMER = {
    "task": {"type": "python_source", "context": 64, "width": 128, "depth": 2, "heads": 4},
    "batch_size": 64,
    "optimizer": {"type": "adamw", "lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.01},
    "seed": 0,
}
_MODELS: dict[str, dict[str, Any]] = {"mlp": _MLP, "transformer": _TRANSFORMER}


def ours(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    """Train through the command line; times and losses of the steps as the run directory has them."""
    config = {
        "name": "run",
        "task": spec["task"],
        # Validation and checkpoints once, after the last step: the peer has neither.
        "train": {
            **{key: spec[key] for key in ("batch_size", "steps", "optimizer", "seed")},
            "validate_every_steps": spec["steps"],
        },
        "strategy": {"network": {"data": _WORKERS}},
        "checkpoint": {"every_steps": spec["steps"]},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    lines = commands.step_lines(place / "run")
    return {"times": [line["time_s"] for line in lines], "losses": [line["loss"] for line in lines]}


def peer(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    told, out = commands.write_json(place / "spec.json", spec), place / "out.json"
    command = [commands.script("torchrun"), "--standalone", "--nproc-per-node", str(_WORKERS)]
    commands.run_command([*command, commands.peer("ddp"), str(told), str(out)], _TIMEOUT_S)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=names, default=names, metavar="NAME")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(4)
    steps = 25 if options.quick else 60
    report.settings = {"rounds": rounds, "workers": _WORKERS, "threads_a_worker": 1, "steps": steps}
    report.settings["warm_up_steps_left_out"] = _WARM_UP_STEPS
    for model in options.arguments.models:
        _measure_model(report, options, model, {**_MODELS[model], "steps": steps}, rounds)
    report.notes += [
        (
            "Ours is the whole of `orchestray train`: samples through its data plane, a metric line a step, a "
            "driver beside the two workers. The peer has its data in memory as tensors, records nothing, and its "
            "loss is its own share's."
        ),
        (
            "Both train the same: model, initial weights, order of samples, batch and optimizer; the losses of the "
            f"first {COMPARED_STEPS} steps are compared on every round (tolerance {LOSS_TOLERANCE:g})."
        ),
        (
            "A run's step time is the median of the differences between the ends of its steps; its mean shows what "
            "a median would hide. `DDP` is `torch.optim` with default options, `DDP, fused` its fused kernels."
        ),
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    told = {"ours": spec, "DDP": spec, "DDP, fused": {**spec, "fused": True}}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in told}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{name.replace(', ', '-')}-{len(found[name])}"
        place.mkdir()
        found[name].append((ours if name == "ours" else peer)(told[name], place))

    benchmark.alternate(
        {name: partial(call, name) for name in told}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    check_same_training(model, found, "DDP")
    medians, means = {}, {}
    for name, runs in found.items():
        steps = [[1e3 * (b - a) for a, b in pairwise(run["times"][_WARM_UP_STEPS - 1 :])] for run in runs]
        medians[name] = report.add(f"{model}: {name}, median step", "ms", [statistics.median(run) for run in steps])
        means[name] = report.add(f"{model}: {name}, mean step", "ms", [statistics.fmean(run) for run in steps])
        report.details[f"{model}: {name}, every step in ms"] = [[round(step, 3) for step in run] for run in steps]
    ratio = report.compare(f"{model}: ours / DDP", medians["ours"].values, medians["DDP"].values)
    report.compare(f"{model}: ours / DDP, of the means", means["ours"].values, means["DDP"].values)
    report.compare(f"{model}: ours / DDP, fused", medians["ours"].values, medians["DDP, fused"].values)
    report.settings[model] = {key: spec[key] for key in ("batch_size", "optimizer")}
    report.settings[model]["parameters"] = found["DDP"][0]["parameters"]
    report.goal(f"{model}: step time / DDP", ratio, _LIMIT)


if __name__ == "__main__":
    benchmark.run(
        "step_time",
        "Step time of two replicas: ours against the same training under torchrun and DDP.",
        measure,
        add_options,
    )
