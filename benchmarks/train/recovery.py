"""SIGKILL of one of two workers: how long until the next step is done, ours (also with a warm spare) and Ray Train."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import benchmark, commands, machine

_START_TIMEOUT_S = 120.0
_RECOVERY_TIMEOUT_S = 120.0
_CALM_S = 3.0
_SPARE_CALM_S = 10.0  # the spare's successor imports meanwhile, and the next kill shall find it warm
_CHECKPOINT_EVERY_STEPS = 100
_INTERRUPTED = 130

_SPEC: dict[str, Any] = {
    "task": {"type": "digits", "hidden": [128, 128]},
    "batch_size": 64,
    "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9},
    "seed": 0,
}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(2)
    kills = 1 if options.quick else 3
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "spare": [], "ray_train": []}

    def place(name: str) -> Path:
        directory = options.workspace / f"{name}-{len(found[name])}"
        directory.mkdir()
        return directory

    sides: dict[str, Callable[[], None]] = {
        "ours": lambda: found["cold"].extend(_ours(place("cold"), kills, spares=0)),
        "ours, spares: 1": lambda: found["spare"].extend(_ours(place("spare"), kills, spares=1)),
        "Ray Train": lambda: found["ray_train"].extend(_ray_train(place("ray_train"), max(1, kills - 1))),
    }
    benchmark.alternate(sides, rounds, benchmark.say)
    report.settings = {
        "rounds": rounds,
        "kills_a_round": kills,
        "workers": 2,
        "checkpoint_every_steps": _CHECKPOINT_EVERY_STEPS,
        "training": _SPEC,
    }
    report.details["kills"] = found
    wall = {name: [kill["next_step_s"] for kill in of] for name, of in found.items()}
    cold = report.add("ours: SIGKILL to the end of the next step", "s", wall["cold"])
    report.add("ours: SIGKILL to `worker_lost`", "s", [kill["seen_s"] for kill in found["cold"]])
    report.add("ours: `recovered` says", "s", [kill["recovered_s"] for kill in found["cold"]])
    spare = report.add("ours, spares: 1: SIGKILL to the end of the next step", "s", wall["spare"])
    report.add("ours, spares: 1: `recovered` says", "s", [kill["recovered_s"] for kill in found["spare"]])
    report.add("Ray Train: SIGKILL to the end of the next step", "s", wall["ray_train"])
    report.add("Ray Train: steps it did again", "steps", [kill["steps_again"] for kill in found["ray_train"]])
    report.add("ours: steps done again", "steps", [k["steps_again"] for of in ("cold", "spare") for k in found[of]])
    report.compare("recovery / Ray Train", wall["cold"], wall["ray_train"])
    report.compare("recovery with a spare / Ray Train", wall["spare"], wall["ray_train"])
    report.goal("SIGKILL to the next step", cold.median, 2.0, "s")
    report.goal("SIGKILL to the next step, spares: 1", spare.median, 0.5, "s")
    not_warm = [kill for kill in found["spare"] if not kill["from_spare"]]
    report.notes += [
        (
            "Ranks 1 and 0 are killed in turns, at a random moment. The clock starts just before the signal and ends "
            "at the time metrics.jsonl has for the next step (Ray Train: the restarted worker's own log of its steps)."
        ),
        (
            f"With a spare there are three processes on {machine.usable_cores()} core(s); of {len(found['spare'])} "
            f"kills {len(not_warm)} found no spare to step in."
        ),
        "Ray Train: FailureConfig(max_failures=100), a checkpoint with every report, no change of its defaults.",
    ]


def _ours(place: Path, kills: int, *, spares: int) -> list[dict[str, Any]]:
    config = {
        "name": "run",
        "task": _SPEC["task"],
        "train": {
            **{key: _SPEC[key] for key in ("batch_size", "optimizer", "seed")},
            "steps": 10_000_000,
            "validate_every_steps": 10_000_000,
        },
        "strategy": {"network": {"data": 2}},
        "checkpoint": {"every_steps": _CHECKPOINT_EVERY_STEPS},
        "resources": {"spares": spares},
        "max_restarts": 100,
    }
    told = commands.write_json(place / "config.yaml", config)
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    run = place / "run"
    found = []
    with commands.running(command) as under_way:
        under_way.wait_until(lambda: _has_steps(run), _START_TIMEOUT_S, "the first step")
        for number in range(kills):
            _stay_calm(under_way, _SPARE_CALM_S if spares else _CALM_S)
            found.append(_kill_ours(under_way, run, rank=1 - number % 2))
        _stay_calm(under_way, 1.0)
        under_way.interrupt()
        under_way.wait(_START_TIMEOUT_S, statuses=(_INTERRUPTED,))
    return found


def _has_steps(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _kill_ours(under_way: commands.Running, run: Path, *, rank: int) -> dict[str, Any]:
    actors = json.loads((run / "actors.json").read_text(encoding="utf-8"))
    pid = next(actor["pid"] for actor in actors if actor["role"] == "worker" and actor["rank"] == rank)
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)

    def events(kind: str) -> list[dict[str, Any]]:
        seen = [event for event in commands.read_lines(run / "events.jsonl") if event["event"] == kind]
        return [event for event in seen if under_way.began_at + event["time_s"] > killed_at]

    def next_step() -> dict[str, Any] | None:
        """Return the first step after the replacement: lines of steps done before the loss may still come after it."""
        replaced = events("worker_replaced")
        if not replaced or not events("recovered"):
            return None
        return next((line for line in commands.step_lines(run) if line["time_s"] > replaced[-1]["time_s"]), None)

    line = under_way.wait_until(next_step, _RECOVERY_TIMEOUT_S, "the step after the recovery")
    before = [line for line in commands.step_lines(run) if under_way.began_at + line["time_s"] <= killed_at]
    return {
        "rank": rank,
        "next_step_s": under_way.began_at + line["time_s"] - killed_at,
        "seen_s": under_way.began_at + events("worker_lost")[0]["time_s"] - killed_at,
        "recovered_s": events("recovered")[-1]["seconds"],
        "steps_again": max(0, before[-1]["step"] - line["step"] + 1),
        "from_spare": bool(events("worker_replaced")[-1]["spare"]),
    }


def _ray_train(place: Path, kills: int) -> list[dict[str, Any]]:
    spec = {**_SPEC, "storage": str(place), "checkpoint_every_steps": _CHECKPOINT_EVERY_STEPS}
    told = commands.write_json(place / "spec.json", spec)
    found = []
    with commands.running(commands.python(commands.peer("ray_train_recovery"), str(told))) as under_way:
        # Until there is a checkpoint to go back to.
        enough = _CHECKPOINT_EVERY_STEPS + 1
        under_way.wait_until(lambda: len(_steps_of(place, 0)) > enough, _START_TIMEOUT_S, "the first checkpoint")
        for number in range(kills):
            _stay_calm(under_way, _CALM_S)
            found.append(_kill_ray_train(under_way, place, rank=1 - number % 2))
    return found


def _kill_ray_train(under_way: commands.Running, place: Path, *, rank: int) -> dict[str, Any]:
    """Kill a worker, and read in rank 0's log when training goes on: Ray Train restarts every worker."""
    last = _steps_of(place, 0)[-1]
    killed_at = time.time()
    os.kill(_steps_of(place, rank)[-1]["pid"], signal.SIGKILL)

    def restarted() -> list[dict[str, Any]]:
        return [line for line in _steps_of(place, 0) if line["pid"] != last["pid"] and line["at"] > killed_at]

    new = under_way.wait_until(restarted, _RECOVERY_TIMEOUT_S, "the recovery of Ray Train")
    return {
        "rank": rank,
        "next_step_s": new[0]["at"] - killed_at,
        "steps_again": max(0, last["step"] - new[0]["step"] + 1),
    }


def _steps_of(place: Path, rank: int) -> list[dict[str, Any]]:
    return commands.read_lines(place / f"steps-{rank}.jsonl")


def _stay_calm(under_way: commands.Running, seconds: float) -> None:
    """Let it train for about `seconds`: the moment of the kill must not depend on what came before."""
    time.sleep(seconds * random.uniform(0.8, 1.2))
    under_way.check_alive()


if __name__ == "__main__":
    benchmark.run(
        "recovery",
        "SIGKILL of one of two workers to the end of the next step: ours, with a spare, and Ray Train.",
        measure,
    )
