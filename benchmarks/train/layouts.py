"""One training under every layout of its network: step time, bytes, memory, bubble, and how near the weights come."""

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
_SINGLE = "one process"
_MICRO_BATCHES = 8

_CONFIG = {
    "name": "single",
    "task": {"type": "digits", "hidden": [512, 512, 512, 512]},
    "train": {
        "batch_size": 256,
        "accumulate": _MICRO_BATCHES,
        "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.9},
        "seed": 0,
    },
}


def _pipeline(schedule: str) -> dict[str, Any]:
    return {"strategy.network.pipeline": 2, "strategy.network.schedule": schedule}


_DATA = {"strategy.network.data": 2}
_LAYOUTS: dict[str, dict[str, Any]] = {
    _SINGLE: {},
    "recompute sqrt": {"train.recompute": "sqrt"},
    "data 2": _DATA,
    "data 2, ZeRO 1": {**_DATA, "strategy.exchange.shard": "optimizer"},
    "data 2, ZeRO 2": {**_DATA, "strategy.exchange.shard": "gradients"},
    "data 2, ZeRO 3": {**_DATA, "strategy.exchange.shard": "parameters"},
    "tensor 2": {"strategy.network.tensor": 2},
    "pipeline 2, naive": _pipeline("naive"),
    "pipeline 2, gpipe": _pipeline("gpipe"),
    "pipeline 2, 1f1b": _pipeline("1f1b"),
    "pipeline 2, interleaved_1f1b": _pipeline("interleaved_1f1b"),
    "pipeline 2, zero_bubble": _pipeline("zero_bubble"),
    "pipeline 2, zbv": _pipeline("zbv"),
    "pipeline 2, dual_pipe_v": _pipeline("dual_pipe_v"),
    "pipeline 2, pipedream": _pipeline("pipedream"),
    "data 2 x pipeline 2": {**_DATA, **_pipeline("1f1b")},
    "data 2 x tensor 2": {**_DATA, "strategy.network.tensor": 2},
    "data 2 x tensor 2 x pipeline 2": {**_DATA, "strategy.network.tensor": 2, **_pipeline("1f1b")},
}
"""Changes that each layout makes in the config of one process."""
_QUICK = (_SINGLE, "data 2, ZeRO 3", "tensor 2", "pipeline 2, 1f1b", "pipeline 2, pipedream", "recompute sqrt")


def add_options(parser: Any) -> None:
    parser.add_argument("--only", nargs="+", choices=tuple(_LAYOUTS), default=None, metavar="NAME", help="of a layout")
    parser.add_argument("--steps", type=int, default=None, help="of a run")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    steps = options.arguments.steps or (20 if options.quick else 60)
    if steps <= _WARM_UP_STEPS + 1:
        raise benchmark.BenchmarkError(f"the first {_WARM_UP_STEPS} steps are left out: give more --steps than {steps}")
    rounds = options.rounds(1)
    wanted = options.arguments.only or (_QUICK if options.quick else tuple(_LAYOUTS))
    names = [name for name in _LAYOUTS if name in wanted or name == _SINGLE]
    report.settings = {"rounds": rounds, "steps": steps, "warm_up_steps_left_out": _WARM_UP_STEPS, **_CONFIG}
    report.settings["overrides"] = {name: _overrides(name) for name in names}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def call(name: str) -> None:
        found[name].append(_train(name, steps, options.workspace / str(len(found[name]))))

    benchmark.alternate({name: partial(call, name) for name in names}, rounds, benchmark.say)
    differences = _differences(options.workspace / "0", names)
    for name, runs in found.items():
        report.add(f"{name}, step", "ms", [1e3 * step_s for run in runs for step_s in run["steps_s"]])
    report.table(
        ["layout", "workers", "step", "sent a step", "most memory", "most activations", "bubble", "weights differ by"],
        [_row(name, runs, differences[name]) for name, runs in found.items()],
    )
    report.details = {name: {"runs": runs, "difference": differences[name]} for name, runs in found.items()}
    report.notes += [
        (
            "Each is the whole of `orchestray train`, float32, a thread a worker, with the same "
            f"{_MICRO_BATCHES} micro-batches a batch. Workers beyond the machine's cores take turns on them."
        ),
        (
            "`step` is the median of the differences between the ends of steps; `sent a step` is what all workers send "
            "together, in the median step."
        ),
        (
            "`most memory` is the resident set of each worker at its largest, Python and torch included; `most "
            "activations` the bytes kept for the backward pass at once, by worker, in the steps that are watched. "
            "pipedream's are not watched. The model is too small for its shards to show here: `sharding` has them."
        ),
        "ZeRO 3 brings each layer's parameters together twice a micro-batch; the others send gradients once a step.",
        (
            f"`weights differ by` is the largest absolute difference to the weights of {_SINGLE} after {steps} steps. "
            "pipedream is another algorithm, with other weights."
        ),
    ]


def _overrides(name: str) -> list[str]:
    changes = dict(_LAYOUTS[name])
    if "strategy.network.pipeline" in changes:  # there the batch is split by the network
        changes |= {"strategy.network.microbatches": _MICRO_BATCHES, "train.accumulate": 1}
    return [f"{key}={value}" for key, value in changes.items()]


def _directory(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def _train(name: str, steps: int, place: Path) -> dict[str, Any]:
    place.mkdir(exist_ok=True)
    told = commands.write_json(place / "config.yaml", _CONFIG)  # JSON is YAML
    # Validation and a checkpoint once, after the last step.
    once = [f"{key}={steps}" for key in ("train.steps", "train.validate_every_steps", "checkpoint.every_steps")]
    command = [commands.script("orchestray"), "train", str(told), *once, *_overrides(name)]
    command += ["--name", _directory(name), "--runs-dir", str(place), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    run = place / _directory(name)
    lines = commands.step_lines(run)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {
        "steps_s": [b["time_s"] - a["time_s"] for a, b in pairwise(lines[_WARM_UP_STEPS - 1 :])],
        "bytes_sent_a_step": statistics.median(line["bytes_sent"] for line in lines[_WARM_UP_STEPS:]),
        "bytes": result["bytes"],
        "memory": result["memory"],
        "bubble": result["bubble"],
        "loss": result["final"]["train"]["loss"],
    }


def _differences(runs: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the differences of each layout's weights and losses from those of one process."""
    from orchestray.trainers.saved.compare import compare_runs
    from orchestray.trainers.saved.run import load_run

    single, *others = [load_run(runs / _directory(name)) for name in names]
    return {name: each.to_json() for name, each in zip(names, compare_runs(single, [single, *others]), strict=True)}


def _row(name: str, runs: list[dict[str, Any]], difference: dict[str, Any]) -> list[str]:
    last, weights = runs[-1], difference["weights"]
    activations = last["memory"].get("peak_activation_bytes", [])
    step_s = statistics.median(step_s for run in runs for step_s in run["steps_s"])
    return [
        name,
        str(len(last["memory"]["peak_bytes"])),
        f"{1e3 * step_s:.1f} ms",
        f"{last['bytes_sent_a_step'] / 1e6:.2f} MB" if last["bytes_sent_a_step"] else "-",
        _range(last["memory"]["peak_bytes"], 1e6, "MB", "{:.0f}"),
        _range(activations, 1e3, "KB", "{:.0f}"),
        "-" if last["bubble"] is None else f"{100 * last['bubble']:.0f} %",
        _distance(name, weights),
    ]


def _distance(name: str, weights: dict[str, Any]) -> str:
    if name == _SINGLE:
        return "-"
    return "the same bits" if weights["same_bits"] else f"{weights['max_difference']:.1e}"


def _range(values: list[int], unit: float, name: str, form: str) -> str:
    """Return the values of all workers, from the least to the most."""
    if not any(values):
        return "-"
    ends = dict.fromkeys(form.format(value / unit) for value in (min(values), max(values)))
    return f"{' to '.join(ends)} {name}"


if __name__ == "__main__":
    benchmark.run(
        "layouts",
        "One training under every layout of its network, on one machine: what each costs, and how exact it is.",
        measure,
        add_options,
    )
