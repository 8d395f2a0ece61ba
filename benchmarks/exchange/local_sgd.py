"""Local SGD and DiLoCo that meet every 500 steps against replicas that agree at every step: bytes, and the loss."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_EVERY, _STEPS, _WORKERS = 500, 2000, 2
_QUICK_EVERY, _QUICK_STEPS = 50, 200
_LOSS_WITHIN = 0.01

_CONFIG = {
    "name": "local-sgd",
    "task": {"type": "digits", "hidden": [64, 64]},
    "train": {
        "batch_size": 64,
        "optimizer": {"type": "sgd", "lr": 0.05},
        "lr_schedule": {"type": "cosine"},
    },
    "strategy": {"network": {"data": _WORKERS}},
}
_SYNCHRONOUS, _LOCAL, _DILOCO, _UNMET = "synchronous", "local SGD", "DiLoCo", "never meeting"
_DILOCO_OF_HUNDREDS = "DiLoCo, outer momentum 0.9"
_SYNCHRONOUS_ADAM, _LOCAL_ADAM = "synchronous, AdamW", "local SGD, AdamW"
_ADAM = {"type": "adamw", "lr": 0.001, "weight_decay": 0.1}
_OUTER = {"type": "sgd", "lr": 0.7, "momentum": 0.3, "nesterov": True}
_OUTER_OF_HUNDREDS = {**_OUTER, "momentum": 0.9}
"""Outer optimizer of the authors of DiLoCo: from a trained model on, with some hundred outer steps."""


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    every, steps = (_QUICK_EVERY, _QUICK_STEPS) if options.quick else (_EVERY, _STEPS)
    seeds = options.rounds(3)
    averaging = {"type": "averaging", "every": every}
    sides: dict[str, dict[str, Any]] = {
        _SYNCHRONOUS: {"strategy.exchange": {"type": "allreduce"}},
        _LOCAL: {"strategy.exchange": averaging},
        _DILOCO: {"strategy.exchange": {**averaging, "outer_optimizer": _OUTER}},
        _DILOCO_OF_HUNDREDS: {"strategy.exchange": {**averaging, "outer_optimizer": _OUTER_OF_HUNDREDS}},
        _SYNCHRONOUS_ADAM: {"strategy.exchange": {"type": "allreduce"}, "train.optimizer": _ADAM},
        _LOCAL_ADAM: {"strategy.exchange": averaging, "train.optimizer": _ADAM},
        _UNMET: {"strategy.exchange": {"type": "averaging", "every": "end"}},
    }
    report.settings = {"every": every, "steps": steps, "seeds": seeds, **_CONFIG, "overrides": sides}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def call(name: str) -> None:
        found[name].append(_train(name, sides[name], steps, len(found[name]), options.workspace))

    benchmark.alternate({name: partial(call, name) for name in sides}, seeds, benchmark.say)
    _report(report, found, every, steps)


def _report(report: benchmark.Report, found: dict[str, list[dict[str, Any]]], every: int, steps: int) -> None:
    sent = {name: statistics.median(run["bytes"] for run in runs) for name, runs in found.items()}
    whole = sent[_SYNCHRONOUS]
    told = sent[_UNMET] - whole / steps  # without its one mean, which is as long as a sum of gradients
    for name, runs in found.items():
        report.add(f"{name}, bytes sent", "MB", [run["bytes"] / 1e6 for run in runs])
        report.add(f"{name}, validation loss", "", [run["loss"] for run in runs])
    for name in (_LOCAL, _DILOCO):
        report.goal(f"{name}, bytes of parameters / synchronous, times {every}", (sent[name] - told) / whole * every, 1)
        losses = ([run["loss"] for run in found[side]] for side in (name, _SYNCHRONOUS))
        ratio = report.compare(f"{name}, validation loss / synchronous", *losses)
        report.goal(f"{name}, validation loss / synchronous", ratio, 1 + _LOSS_WITHIN)
    adam = ([run["loss"] for run in found[side]] for side in (_LOCAL_ADAM, _SYNCHRONOUS_ADAM))
    report.compare("local SGD, validation loss / synchronous, both with AdamW", *adam)
    hundreds = ([run["loss"] for run in found[side]] for side in (_DILOCO_OF_HUNDREDS, _SYNCHRONOUS))
    report.compare(f"{_DILOCO_OF_HUNDREDS}, validation loss / synchronous", *hundreds)
    rows = [
        [
            name,
            f"{sent[name] / 1e6:.3f} MB",
            f"{(sent[name] - (0 if name in (_SYNCHRONOUS, _SYNCHRONOUS_ADAM) else told)) / 1e6:.3f} MB",
            f"{statistics.median(run['loss'] for run in runs):.4f}",
            f"{100 * statistics.median(run['accuracy'] for run in runs):.2f} %",
        ]
        for name, runs in found.items()
    ]
    report.table(["exchange", "sent in all", "of it parameters or gradients", "validation loss", "accuracy"], rows)
    report.details = dict(found)
    report.notes += [
        (
            f"Each is the whole of `orchestray train` with {_WORKERS} workers and {steps} steps, a seed a round. Bytes "
            "are what all workers send together."
        ),
        (
            "Beside their parameters the replicas that train alone tell each other losses and wishes to stop, every 16 "
            f"steps: {told / 1e3:.1f} KB in all, measured by the run that meets last, and left out of the goals. "
            "They do not grow with the model."
        ),
        (
            f"`{_UNMET}` takes the mean once, at the end: what it loses is what meeting is worth. With plain SGD that "
            "is next to nothing on this task, so the goal of the loss is an easy one. With AdamW, against which no "
            "goal is held, the ratio above shows what meeting seldom costs."
        ),
        (
            f"DiLoCo has {steps // every} outer steps here, and an outer momentum of {_OUTER['momentum']:g}, which "
            "remembers little more than the last (tried: 0.3, 0.5 and 0.9). The inner rate is the others'. "
            f"Their momentum of {_OUTER_OF_HUNDREDS['momentum']:g} remembers ten, and is for hundreds of outer steps "
            "from a trained model on: among so few it goes on with the first and longest moves when the last, at an "
            f"inner rate near zero, hardly move at all. `{_DILOCO_OF_HUNDREDS}` shows it; no goal is held against it."
        ),
    ]


def _train(name: str, changes: dict[str, Any], steps: int, seed: int, workspace: Path) -> dict[str, Any]:
    told = commands.write_json(workspace / "config.yaml", _CONFIG)  # JSON is YAML
    once = [f"{key}={steps}" for key in ("train.steps", "train.validate_every_steps", "checkpoint.every_steps")]
    run = f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    command = [commands.script("orchestray"), "train", str(told), *once, *overrides, f"train.seed={seed}"]
    command += ["--name", run, "--runs-dir", str(workspace), "--quiet"]
    commands.run_command(command, _TIMEOUT_S)
    result = json.loads((workspace / run / "result.json").read_text(encoding="utf-8"))
    validation = result["final"]["validation"]
    return {"bytes": result["bytes"]["sent"], "loss": validation["loss"], "accuracy": validation["accuracy"]}


if __name__ == "__main__":
    benchmark.run(
        "local_sgd",
        "Replicas that train alone and meet every 500 steps against replicas that agree at every step.",
        measure,
    )
