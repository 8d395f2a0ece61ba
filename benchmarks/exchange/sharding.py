"""Two replicas that shard: our ZeRO stages against FSDP2 and DDP under torchrun, in turns; times, bytes and memory."""

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
_MEMORY_LIMIT = 0.55

_MLP = {
    "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp"},
    "batch_size": 64,
    "optimizer": {"type": "adamw", "lr": 0.001},
    "seed": 0,
}
_TRANSFORMER = {
    "task": {"type": "python_source", "context": 64, "width": 128, "depth": 4, "heads": 4},
    "batch_size": 64,
    "optimizer": {"type": "adamw", "lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.01},
    "seed": 0,
}
_MODELS: dict[str, dict[str, Any]] = {"mlp": _MLP, "transformer": _TRANSFORMER}
_OURS = {"unsharded": "none", "ZeRO-1": "optimizer", "ZeRO-2": "gradients", "ZeRO-3": "parameters"}
_PEERS = {"DDP": "ddp", "FSDP2": "fsdp"}


def run_side(script: str, spec: dict[str, Any], place: Path) -> dict[str, Any]:
    told, out = commands.write_json(place / "spec.json", spec), place / "out.json"
    command = [commands.script("torchrun"), "--standalone", "--nproc-per-node", str(_WORKERS)]
    commands.run_command([*command, script, str(told), str(out)], _TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=None, help="of a run")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(2)
    steps = options.arguments.steps or (15 if options.quick else 30)
    report.settings = {"rounds": rounds, "workers": _WORKERS, "threads_a_worker": 1, "steps": steps}
    report.settings["warm_up_steps_left_out"] = _WARM_UP_STEPS
    for model in options.arguments.models:
        _measure_model(report, options, model, {**_MODELS[model], "steps": steps}, rounds)
    report.notes += [
        (
            "All sides train in the same loop under torchrun, with their data in memory; the losses of the first "
            f"{COMPARED_STEPS} steps are compared on every round (tolerance {LOSS_TOLERANCE:g})."
        ),
        "FSDP2 and our ZeRO-3 gather the same modules; ours gathers the root's parameters again for the backward pass.",
        (
            "Bytes are what our workers send, all together, in a step. Gloo's own reduce-scatter, which FSDP2 uses, is "
            "an all-reduce: it sends twice what the algebra says."
        ),
        "Held bytes are those of one worker between steps, of whole allocations, against ours without sharding.",
    ]


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: str, spec: dict[str, Any], rounds: int
) -> None:
    ours = str(benchmark.FOLDER / "exchange" / "ours" / "sharding.py")
    sides = {name: (ours, {**spec, "shard": shard}) for name, shard in _OURS.items()}
    sides |= {name: (commands.peer(script), spec) for name, script in _PEERS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{name}-{len(found[name])}"
        place.mkdir()
        found[name].append(run_side(*sides[name], place))

    benchmark.alternate(
        {name: partial(call, name) for name in sides}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    check_same_training(model, found, "DDP")
    medians = {}
    for name, runs in found.items():
        steps = [[1e3 * (b - a) for a, b in pairwise(run["times"][_WARM_UP_STEPS - 1 :])] for run in runs]
        medians[name] = report.add(f"{model}: {name}, median step", "ms", [statistics.median(run) for run in steps])
    for name in _OURS:
        held = found[name][0]["held"]
        report.add(f"{model}: {name}, held", "MB", [sum(held.values()) / 1e6])
        report.add(f"{model}: {name}, sent a step", "MB", [found[name][0]["bytes_sent"] * _WORKERS / 1e6])
    for name in ("ZeRO-1", "ZeRO-2"):
        report.compare(f"{model}: {name} / DDP", medians[name].values, medians["DDP"].values)
    ratio = report.compare(f"{model}: ZeRO-3 / FSDP2", medians["ZeRO-3"].values, medians["FSDP2"].values)
    report.goal(f"{model}: step time of ZeRO-3 / FSDP2", ratio, _LIMIT)
    held = {name: sum(found[name][0]["held"].values()) for name in _OURS}
    report.goal(f"{model}: held by ZeRO-3 / unsharded", held["ZeRO-3"] / held["unsharded"], _MEMORY_LIMIT)
    report.settings[model] = {key: spec[key] for key in ("batch_size", "optimizer")}
    report.settings[model]["parameters"] = found["FSDP2"][0]["parameters"]


if __name__ == "__main__":
    benchmark.run(
        "sharding",
        "Two replicas that shard the optimizer's state, gradients and parameters: ours against FSDP2 and DDP.",
        measure,
        add_options,
    )
