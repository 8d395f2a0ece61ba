"""A pipeline of two stages: ours against bare `torch.distributed.pipelining`, and against one process, in turns."""

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
_STAGES = 2
_MICRO_BATCHES = 8
_LIMIT = 1.05
_SPEEDUP = 1.5

# The two stages of each take about as long.
_MLP = {
    "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp", "widths": [1024] * 9},
    "batch_size": 256,
    "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9},
    "seed": 0,
    "cuts": [8],
}
_TRANSFORMER = {
    "task": {"type": "python_source", "context": 64, "width": 128, "depth": 4, "heads": 4},
    "batch_size": 64,
    "optimizer": {"type": "adamw", "lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.01},
    "seed": 0,
    "cuts": [3],
}
_MODELS: dict[str, dict[str, Any]] = {"mlp": _MLP, "transformer": _TRANSFORMER}
_OURS, _TRAIN, _PEER, _SINGLE, _STREAM = "ours", "orchestray train", "torch", "one process", "ours, pipedream"


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
        "strategy": {
            "network": {
                "pipeline": _STAGES,
                "schedule": spec["schedule"],
                "microbatches": spec["micro_batches"],
                "split": [str(cut) for cut in spec["cuts"]],
            }
        },
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


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(2)
    steps = options.arguments.steps or (25 if options.quick else 30)
    report.settings = {"rounds": rounds, "stages": _STAGES, "micro_batches": _MICRO_BATCHES, "threads_a_worker": 1}
    report.settings.update({"steps": steps, "warm_up_steps_left_out": _WARM_UP_STEPS, "schedule": "1f1b"})
    for model in options.arguments.models:
        spec = {**_MODELS[model], "steps": steps, "micro_batches": _MICRO_BATCHES, "schedule": "1f1b"}
        _measure_model(report, options, model, spec, rounds)
    report.notes += [
        (
            "`ours` and `torch` are the same script under torchrun but for who runs the stages: data in memory, no "
            "driver, no records. `orchestray train` is the whole command: data plane, a metric line a step, a driver."
        ),
        (
            "Both train the same: model, cut, initial weights, order of samples, micro-batches and optimizer; the "
            f"losses of the first {COMPARED_STEPS} steps are compared on every round (tolerance {LOSS_TOLERANCE:g}). "
            "`ours, pipedream` updates after every micro-batch by design, so its losses are its own."
        ),
        "`one process` is plain PyTorch: the same micro-batches one after the other, with one thread.",
        "A run's step time is the median of the differences between the ends of its steps.",
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    ours = str(benchmark.FOLDER / "train" / "ours" / "pipeline.py")
    peer = commands.peer("pipelining")
    sides = {
        _OURS: partial(by_torchrun, ours, _STAGES, spec),
        _TRAIN: partial(by_command, spec),
        _PEER: partial(by_torchrun, peer, _STAGES, spec),
        _SINGLE: partial(by_torchrun, peer, 1, spec),
        _STREAM: partial(by_torchrun, ours, _STAGES, {**spec, "schedule": "pipedream"}),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{name.replace(', ', '-').replace(' ', '-')}-{len(found[name])}"
        place.mkdir()
        found[name].append(sides[name](place))

    benchmark.alternate(
        {name: partial(call, name) for name in sides}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    check_same_training(model, {name: runs for name, runs in found.items() if name != _STREAM}, _PEER)
    medians = {}
    for name, runs in found.items():
        steps = [[1e3 * (b - a) for a, b in pairwise(run["times"][_WARM_UP_STEPS - 1 :])] for run in runs]
        medians[name] = report.add(f"{model}: {name}", "ms", [statistics.median(run) for run in steps]).values
        report.details[f"{model}: {name}, every step in ms"] = [[round(step, 3) for step in run] for run in steps]
    report.settings[model] = {key: spec[key] for key in ("task", "batch_size", "optimizer", "cuts")}
    report.settings[model]["task"] = {**spec["task"], "type": spec["task"]["type"].rpartition("/")[2]}
    for name in (_OURS, _TRAIN):
        ratio = report.compare(f"{model}: {name} / torch", medians[name], medians[_PEER])
        report.goal(f"{model}: step of {name} / torch.distributed.pipelining", ratio, _LIMIT)
    ratio = report.compare(f"{model}: ours / one process", medians[_OURS], medians[_SINGLE])
    report.goal(f"{model}: step of ours / one process (1 / {_SPEEDUP:g})", ratio, 1 / _SPEEDUP)
    report.compare(f"{model}: ours, pipedream / one process", medians[_STREAM], medians[_SINGLE])


if __name__ == "__main__":
    benchmark.run(
        "pipeline",
        "Step time of a pipeline of two stages: ours against bare torch.distributed.pipelining and one process.",
        measure,
        add_options,
    )
