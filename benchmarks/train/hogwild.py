"""HOGWILD: samples a second of two workers, `orchestray train` against bare torch.multiprocessing, in turns."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_WORKERS = 2
_WARM_UP = 10
"""Steps of a hundred that are left out at the start."""
_LIMIT = 1 / 0.95

_MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp"},
        "batch_size": 64,
        "optimizer": {"type": "sgd", "lr": 0.01},
        "seed": 0,
        "steps": 100,
        "num_samples": 4096,
        "steps_per_epoch": 64,
    },
    "cnn": {
        "task": {"type": "digits", "model": "cnn", "hidden": [32, 64]},
        "batch_size": 128,
        "optimizer": {"type": "sgd", "lr": 0.05},
        "seed": 0,
        "steps": 300,
        "num_samples": 1438,
        "steps_per_epoch": 12,
    },
}


def ours(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    """Train through the command line; samples a second, and the losses of the steps."""
    exchange = {"type": "parameter_server", "consistency": "asynchronous", "transport": "shared_memory"}
    config = {
        "name": "run",
        "task": spec["task"],
        # Validation and checkpoints once, after the last step: the peer has neither.
        "train": {
            **{key: spec[key] for key in ("batch_size", "steps", "optimizer", "seed")},
            "validate_every_steps": spec["steps"],
        },
        "strategy": {"network": {"data": _WORKERS}, "exchange": exchange},
        "checkpoint": {"every_steps": spec["steps"]},
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    times = [line["time_s"] for line in commands.step_lines(place / "run")]
    first = _first(spec)
    result = json.loads((place / "run" / "result.json").read_text(encoding="utf-8"))
    return {
        "step_s": (times[-1] - times[first - 1]) / (len(times) - first),
        "loss": result["final"]["train"]["loss"],
        "told": {key: result[key] for key in ("updates", "lost_updates", "workers", "staleness")},
    }


def peer(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    # Ours weighs a share by its part of the batch; the peer's loss is the mean over the share alone.
    optimizer = {**spec["optimizer"], "lr": spec["optimizer"]["lr"] / _WORKERS}
    told, out = commands.write_json(place / "spec.json", {**spec, "optimizer": optimizer}), place / "out.json"
    environment = {"OMP_NUM_THREADS": "1"}
    commands.run_command(commands.python(commands.peer("hogwild"), str(told), str(out)), _TIMEOUT_S, environment)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    first = _first(spec)
    # While both are at work.
    begin, end = max(times[first - 1] for times in found["times"]), min(times[-1] for times in found["times"])
    num_shares = sum(begin < at <= end for times in found["times"] for at in times)
    per_epoch = spec["steps_per_epoch"]
    return {
        "step_s": (end - begin) / (num_shares / _WORKERS),
        "loss": statistics.fmean(loss for losses in found["losses"] for loss in losses[-per_epoch:]),
        "parameters": found["parameters"],
    }


def _first(spec: dict[str, Any]) -> int:
    return int(_WARM_UP * spec["steps"] // 100)


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=names, default=names, metavar="NAME")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    report.settings = {"rounds": rounds, "workers": _WORKERS, "threads_a_worker": 1}
    for model in options.arguments.models:
        spec = {**_MODELS[model], "workers": _WORKERS}
        if options.quick:
            spec["steps"] //= 4
        _measure_model(report, options, model, spec, rounds)
    report.notes += [
        (
            "Ours is the whole of `orchestray train`: a server with the coordinator, samples through the data plane, "
            "a metric line a step. The peer has its data in memory as tensors, and each worker its batches from the "
            "start."
        ),
        (
            "Both train the same model from the same weights on the same batches, each worker with plain SGD on one "
            "thread. The rates are those of the steps after the first tenth, while both workers are at work."
        ),
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    sides = {"ours": ours, "torch.multiprocessing": peer}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{list(sides).index(name)}-{len(found[name])}"
        place.mkdir()
        found[name].append(sides[name](spec, place))

    benchmark.alternate(
        {name: partial(call, name) for name in sides}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    samples = spec["num_samples"] / spec["steps_per_epoch"]
    for name, runs in found.items():
        report.add(f"{model}: {name}, samples a second", "1/s", [samples / run["step_s"] for run in runs])
        report.add(f"{model}: {name}, loss at the end", "", [run["loss"] for run in runs])
    times = {name: [1e3 * run["step_s"] / samples for run in runs] for name, runs in found.items()}
    name = f"{model}: time a sample / torch.multiprocessing"
    ratio = report.compare(name, times["ours"], times["torch.multiprocessing"])
    report.goal(name, ratio, _LIMIT)
    report.settings[model] = {key: spec[key] for key in ("batch_size", "optimizer", "steps")}
    report.settings[model]["parameters"] = found["torch.multiprocessing"][0]["parameters"]
    report.details[f"{model}: ours"] = [run["told"] for run in found["ours"]]


if __name__ == "__main__":
    benchmark.run(
        "hogwild",
        "Samples a second of two HOGWILD workers: `orchestray train` against bare torch.multiprocessing.",
        measure,
        add_options,
    )
