"""Whole lives of a small training, ours and in Ray Train: when it was called, stepped first and last, and ended.

`startup` and `shutdown` read different parts of the same lives.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 240.0
_WORKERS = 2

SPEC: dict[str, Any] = {
    "task": {"type": "digits", "hidden": [128, 128]},
    "batch_size": 64,
    "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
    "seed": 0,
    "steps": 46,  # two epochs
}


def live(options: benchmark.Options, *, twice: bool) -> dict[str, list[dict[str, float]]]:
    """Alternate our command, Ray Train and (with `twice`) two runs in one process of ours.

    Args:
        options: of the benchmark.
        twice: also measure the second run of a process, ours and Ray Train's.

    Returns:
        Seconds by side: "ours", "ray_train", "ours_again", "ray_train_again"; `first_step_s` and `exit_s` count from
        the call, `shutdown_s` from the last step.
    """
    found: dict[str, list[dict[str, float]]] = {"ours": [], "ray_train": []}
    if twice:
        found |= {"ours_again": [], "ray_train_again": []}
    made = 0

    def place() -> Path:
        nonlocal made
        made += 1
        directory = options.workspace / f"life-{made}"
        directory.mkdir()
        return directory

    sides = {
        "orchestray train": lambda: found["ours"].append(_ours(place())),
        "ray.train.torch.TorchTrainer": lambda: _ray_train(place(), found, twice=twice),
    }
    if twice:
        sides["orchestray.train() twice"] = lambda: found["ours_again"].append(_ours_again(place()))
    benchmark.alternate(sides, options.rounds(4), benchmark.say)
    return found


def _config(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "task": SPEC["task"],
        "train": {key: SPEC[key] for key in ("batch_size", "steps", "optimizer", "seed")},
        "strategy": {"network": {"data": _WORKERS}},
    }


def _ours(place: Path) -> dict[str, float]:
    told = commands.write_json(place / "config.yaml", _config("run"))
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place)]
    with commands.running(command) as under_way:
        under_way.wait_until(lambda: commands.step_lines(place / "run"), _TIMEOUT_S, "the first step")
        seen_at = time.time()
        ended_at = under_way.wait(_TIMEOUT_S)
        times = [under_way.began_at + line["time_s"] for line in commands.step_lines(place / "run")]
    return {
        "first_step_s": times[0] - under_way.called_at,
        "seen_s": seen_at - under_way.called_at,
        "shutdown_s": ended_at - times[-1],
        "exit_s": ended_at - under_way.called_at,
    }


def _ours_again(place: Path) -> dict[str, float]:
    told, out = commands.write_json(place / "config.json", _config("run")), place / "out.json"
    command = commands.python(str(benchmark.FOLDER / "train" / "ours" / "train_twice.py"), str(told), str(out))
    commands.run_command(command, _TIMEOUT_S)
    second: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))[1]
    return second


def _ray_train(place: Path, found: dict[str, list[dict[str, float]]], *, twice: bool) -> None:
    told = commands.write_json(place / "spec.json", {**SPEC, "storage": str(place), "runs": 2 if twice else 1})
    out = place / "out.json"
    called_at, ended_at = commands.run_command(
        commands.python(commands.peer("ray_train_twice"), str(told), str(out)), _TIMEOUT_S
    )
    runs = json.loads(out.read_text(encoding="utf-8"))
    found["ray_train"].append(
        {
            "first_step_s": runs[0]["first_step_at"] - called_at,
            "shutdown_s": ended_at - runs[-1]["last_step_at"],
            "exit_s": ended_at - called_at,
        }
    )
    if twice:
        found["ray_train_again"].append({"first_step_s": runs[1]["first_step_at"] - runs[1]["called_at"]})
