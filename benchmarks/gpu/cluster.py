"""Runs of `orchestray train` on a Ray of their own, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.check import Skip
from gpu.machine import processes_on_gpus
from gpu.training import DIGITS
from harness import commands

_START_S, _END_S = 100.0, 150.0


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    losses: dict[int, float]
    most_on_gpus: int
    """Most of its processes that had a CUDA context at once; 0 if nobody looked."""


@dataclass(frozen=True)
class Killed:
    """A worker's death, and what came after."""

    next_step_s: float
    from_spare: bool
    is_dead_on_gpu: bool
    """True if the dead process still had a CUDA context when the next step was done."""


def config_of(
    name: str,
    steps: int,
    *,
    gpus: float,
    data: int = 1,
    exchange: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a config of a run on digits.

    Args:
        name: name of the run.
        steps: number of steps.
        gpus: GPUs of a worker.
        data: number of replicas.
        exchange: exchange section.
        resources: further keys of the resources section.
    """
    train = {"batch_size": 32, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.05}, "seed": 0}
    return {
        "name": name,
        "task": DIGITS,
        "train": {**train, "validate_every_steps": 10**9},
        "strategy": {"network": {"data": data}, "exchange": {"type": "allreduce", **(exchange or {})}},
        "resources": {"gpus_per_worker": gpus, **(resources or {})},
        "checkpoint": {"every_steps": 1000},
    }


def command_of(place: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the command that trains by a config, which is written to the folder."""
    file = commands.write_json(place / f"{config['name']}.yaml", dict(config))
    return commands.python("-m", "orchestray.cli.app", "train", str(file), "--runs-dir", str(place), "--quiet")


def train(place: Path, config: Mapping[str, Any], *, watch: bool = False) -> Done:
    """Train to the end.

    Args:
        place: folder of the run.
        config: config of the run.
        watch: True to count its processes on GPUs.
    """
    most = 0
    before = processes_on_gpus() if watch else set()
    with commands.running(command_of(place, config), _environment()) as under_way:
        while watch and under_way.process.poll() is None:
            most = max(most, len(processes_on_gpus() - before))
            time.sleep(0.2)
        under_way.wait(_END_S)
    lines = commands.step_lines(place / str(config["name"]))
    return Done({line["step"]: line["loss"] for line in lines}, most)


def num_restarts(run: Path) -> int:
    """Return how often a run that has ended began again from a checkpoint."""
    return int(json.loads((run / "result.json").read_text(encoding="utf-8"))["restarts"])


def kill_a_worker(place: Path, config: Mapping[str, Any]) -> Killed:
    """Kill the second of two workers by SIGKILL while it trains, and wait for the next step."""
    run = place / str(config["name"])
    with commands.running(command_of(place, config), _environment()) as under_way:
        under_way.wait_until(lambda: commands.step_lines(run), _START_S, "the first step")
        time.sleep(random.uniform(8, 10))  # until the spare is warm
        actors = json.loads((run / "actors.json").read_text(encoding="utf-8"))
        pid = next(actor["pid"] for actor in actors if actor["role"] == "worker" and actor["rank"] == 1)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)

        def events(kind: str) -> list[dict[str, Any]]:
            seen = [event for event in commands.read_lines(run / "events.jsonl") if event["event"] == kind]
            return [event for event in seen if under_way.began_at + event["time_s"] > killed_at]

        def next_step() -> dict[str, Any] | None:
            if not (replaced := events("worker_replaced")) or not events("recovered"):
                return None
            return next((line for line in commands.step_lines(run) if line["time_s"] > replaced[-1]["time_s"]), None)

        line = under_way.wait_until(next_step, _START_S, "the step after the recovery")
        left: set[int] = set()
        with contextlib.suppress(Skip):
            left = processes_on_gpus()
        found = Killed(
            under_way.began_at + line["time_s"] - killed_at, bool(events("worker_replaced")[-1]["spare"]), pid in left
        )
        under_way.interrupt()
        under_way.wait(_END_S, statuses=(0, 130))
    return found


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
