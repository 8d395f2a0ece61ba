"""A storm: of four workers one is killed every 5 s, by SIGKILL, by memory and by SIGSTOP in turn. How much of the time
counted, ours with a spare, Ray Train and a bare torchrun; and whether our weights are those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from harness import benchmark, commands, machine

_WORKERS = 4
_SHARE_S = 0.05
_CALM_S = 6.0
"""Seconds before the first kill, in which the length of a step is measured."""
_CHECKPOINT_EVERY_STEPS = 20
_MANY = 100_000
_TIMEOUT_S = 600.0
_HEADROOM_BYTES, _LEAK_BYTES = 4 * 2**30, 2**33
"""Memory that Ray's monitor lets all workers take together; memory that a worker leaks if nobody stops it."""
_KINDS = ("SIGKILL", "memory", "SIGSTOP")
_PEERS = ("Ray Train", "torchrun")
_GOAL = 0.8
_PATIENCE_OF_PEERS_S = 5.0
"""Seconds for which a peer's worker may be silent: with less, busy ones are taken for lost."""

_TRAINING: dict[str, Any] = {
    "batch_size": 64,
    "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9},
    "seed": 0,
}


@dataclass
class Side:
    """A training under way in a storm."""

    under_way: commands.Running
    pids: Callable[[], Mapping[int, int]]
    """Process ids of the workers that have made a step since they started, by rank."""
    steps: Callable[[], list[tuple[float, int]]]
    """Wall-clock time of the end of each step, and its number."""
    hunger: Path | None
    """Directory of the files that make workers hungry; None: the kernel's SIGKILL stands for it."""
    kills: list[dict[str, Any]] = field(default_factory=list)

    def weather(self, num_kills: int, period_s: float, dice: random.Random) -> dict[str, Any]:
        """Let it train for a while, then kill a worker every `period_s`; return what came of it."""
        self.under_way.wait_until(self.steps, _TIMEOUT_S, "the first step")
        time.sleep(_CALM_S)
        calm = self.steps()
        # The first second has steps of workers that start.
        ends = [at for at, _ in calm if at > calm[0][0] + 1.0]
        step_s = statistics.median(b - a for a, b in pairwise(ends))
        began_at = time.time()
        for number in range(num_kills):
            time.sleep(max(0.0, began_at + number * period_s - time.time()))
            self._kill(
                _KINDS[number % len(_KINDS)], dice.randrange(_WORKERS), before=began_at + (number + 1) * period_s
            )
        time.sleep(max(0.0, began_at + num_kills * period_s - time.time()))
        ended_at = time.time()
        gave_up = None if self.under_way.process.poll() is None else self.under_way.text().strip()[-1000:]
        steps = self.steps()
        counted = _reached(steps, ended_at) - _reached(steps, began_at)
        for kill in self.kills:
            reached = _reached(steps, kill["at"])
            ended = [at for at, step in steps if at > kill["at"] and step > reached]
            kill["next_step_s"] = round(ended[0] - kill["at"], 3) if ended else None
        return {
            "step_s": step_s,
            "steps": counted,
            "goodput": counted * step_s / (ended_at - began_at),
            "kills": self.kills,
            "gave_up": gave_up,
        }

    def _kill(self, kind: str, rank: int, before: float) -> None:
        """Kill the worker of a rank as soon as it is at work, unless that takes until the next one's turn."""
        while time.time() < before and self.under_way.process.poll() is None:
            pid = self.pids().get(rank)
            if pid is not None and _is_at_work(pid):
                break
            time.sleep(0.05)
        else:
            return
        if kind == "memory" and self.hunger is not None:  # Ray kills the newest first: others would only die in vain
            pids = {rank: pid for rank, pid in self.pids().items() if _is_at_work(pid)}
            rank, pid = max(pids.items(), key=lambda item: psutil.Process(item[1]).create_time())
        self.kills.append({"kind": kind, "rank": rank, "at": time.time()})
        if kind == "memory" and self.hunger is not None:
            (self.hunger / f"hungry-{pid}").touch()
        else:
            os.kill(pid, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)


def _reached(steps: list[tuple[float, int]], at: float) -> int:
    """Return the highest step that was done until a time."""
    return max((step for when, step in steps if when <= at), default=0)


def _is_at_work(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _memory_limit() -> dict[str, str]:
    """Return the environment in which Ray kills a worker once a given amount of memory is used."""
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + _HEADROOM_BYTES) / memory.total
    return {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_worker_killing_policy_by_group": "true"}


# -- ours --------------------------------------------------------------------------------------------------------------


def _config(place: Path, steps: int, share_s: float, **more: Any) -> Path:
    task = {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:StormyDigits", "num_bytes": _LEAK_BYTES}
    config = {
        "name": "run",
        "task": {**task, "seconds_a_share": share_s, "directory": str(place)},
        "train": {**_TRAINING, "steps": steps, "validate_every_steps": _MANY},
        "strategy": {"network": {"data": _WORKERS}},
        "checkpoint": {"every_steps": _CHECKPOINT_EVERY_STEPS},
        **more,
    }
    return commands.write_json(place / "config.yaml", config)  # JSON is YAML


@contextmanager
def _trained(place: Path, config: Path, environment: Mapping[str, str] | None = None) -> Iterator[commands.Running]:
    command = [commands.script("orchestray"), "train", str(config), "--runs-dir", str(place), "--quiet"]
    with commands.running(command, environment) as under_way:
        yield under_way


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in commands.read_lines(run / "events.jsonl") if line["event"] == kind]


def ours(place: Path, num_kills: int, period_s: float, hang_timeout_s: float, dice: random.Random) -> dict[str, Any]:
    """Train through a storm to the end, then the same without; return what came of it, and the bytes that differ."""
    num_steps = round((_CALM_S + num_kills * period_s) / _SHARE_S)
    resources = {"cpus_per_worker": 0.25, "spares": 1}
    patience = {"max_restarts": _MANY, "hang_timeout_s": hang_timeout_s}
    run = place / "run"

    def pids() -> dict[int, int]:
        replaced = [line["time_s"] for line in _events(run, "worker_replaced")]
        if replaced and commands.step_lines(run)[-1]["time_s"] < replaced[-1]:
            return {}
        actors = json.loads((run / "actors.json").read_text(encoding="utf-8"))
        return {actor["rank"]: actor["pid"] for actor in actors if actor["role"] == "worker"}

    config = _config(place, num_steps, _SHARE_S, resources=resources, **patience)
    with _trained(place, config, _memory_limit()) as under_way:

        def steps() -> list[tuple[float, int]]:
            return [(under_way.began_at + line["time_s"], line["step"]) for line in commands.step_lines(run)]

        found = Side(under_way, pids, steps, hunger=place).weather(num_kills, period_s, dice)
        under_way.wait(_TIMEOUT_S + num_kills * period_s)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    calm = place / "calm"
    calm.mkdir()
    with _trained(calm, _config(calm, num_steps, 0.0, resources={"cpus_per_worker": 0.25})) as under_way:
        under_way.wait(_TIMEOUT_S)
    one, two = ((at / "run/model/model.safetensors").read_bytes() for at in (place, calm))
    differing = sum(a != b for a, b in zip(one, two, strict=True))
    return {
        **found,
        "result_goodput": result["goodput"],
        "restarts": result["restarts"],
        "causes": [event["cause"] for event in _events(run, "worker_lost")],
        "differing_bytes": differing,
    }


# -- peers -------------------------------------------------------------------------------------------------------------


def peer(name: str, place: Path, num_kills: int, period_s: float, dice: random.Random) -> Any:
    """Train a peer through a storm; return what came of it."""
    spec = {
        **_TRAINING,
        "task": {
            "type": "StormyDigits",
            "seconds_a_share": _SHARE_S,
            "directory": str(place),
            "num_bytes": _LEAK_BYTES,
        },
        "storage": str(place),
        "checkpoint_every_steps": _CHECKPOINT_EVERY_STEPS,
        "workers": _WORKERS,
        "hang_timeout_s": _PATIENCE_OF_PEERS_S,
    }
    told = str(commands.write_json(place / "spec.json", spec))
    environment = {
        **_memory_limit(),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{_PATIENCE_OF_PEERS_S:g}",
    }
    command = {
        "Ray Train": commands.python(commands.peer("ray_train_recovery"), told),
        "torchrun": [
            *(
                commands.script("torchrun"),
                "--nproc-per-node",
                str(_WORKERS),
                "--max-restarts",
                str(_MANY),
            ),
            *("--monitor-interval", "0.1", commands.peer("torchrun_storm"), told),
        ],
    }[name]

    def lines(rank: int) -> list[dict[str, Any]]:
        return commands.read_lines(place / f"steps-{rank}.jsonl")

    def pids() -> dict[int, int]:
        return {rank: of_rank[-1]["pid"] for rank in range(_WORKERS) if (of_rank := lines(rank))}

    def steps() -> list[tuple[float, int]]:
        return [(line["at"], line["step"]) for line in lines(0)]

    with commands.running(command, environment) as under_way:
        hunger = place if name == "Ray Train" else None
        return Side(under_way, pids, steps, hunger).weather(num_kills, period_s, dice)


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds, period_s = options.rounds(1), options.arguments.period_s
    num_kills = 3 if options.quick else options.arguments.kills
    hang_timeout_s = options.arguments.hang_timeout_s
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours", *options.arguments.peers)}

    def weather(name: str) -> None:
        place = options.workspace / f"{name.replace(' ', '-')}-{len(found[name])}"
        place.mkdir()
        dice = random.Random(len(found[name]))
        if name == "ours":
            found[name].append(ours(place, num_kills, period_s, hang_timeout_s, dice))
        else:
            found[name].append(peer(name, place, min(num_kills, options.arguments.peer_kills), period_s, dice))

    benchmark.alternate({name: lambda name=name: weather(name) for name in found}, rounds, benchmark.say)
    _add_figures(report, found)
    report.details["storms"] = found
    report.settings = {
        "rounds": rounds,
        "kills": num_kills,
        "peer_kills": min(num_kills, options.arguments.peer_kills),
        "period_s": period_s,
        "workers": _WORKERS,
        "hang_timeout_s": hang_timeout_s,
        "seconds_a_share": _SHARE_S,
        "checkpoint_every_steps": _CHECKPOINT_EVERY_STEPS,
        "training": _TRAINING,
    }
    report.notes += [
        (
            f"Our storm has {num_kills} kills, one every {period_s:g} s; the claim is made for 200. "
            "Peers hardly train in one, so theirs may be shorter (`--peer-kills`)."
        ),
        "Goodput: steps that counted, times the length of a step before the storm, over the time of the storm.",
        f"A worker sleeps {_SHARE_S:g} s for a share, since four workers share {machine.usable_cores()} core(s).",
        (
            "Memory: the newest worker leaks, about 0.4 GB/s here, until Ray's monitor kills it, and a spare before it "
            "if that is newer (RAY_worker_killing_policy_by_group; by default Ray kills several). torchrun has no "
            "monitor: a SIGKILL, as the kernel's, stands for it."
        ),
        (
            "Workers that restart are not killed again before they have made a step, so slow ones meet fewer kills. "
            f"Peers wait {_PATIENCE_OF_PEERS_S:g} s for silent workers (Ray Train's health check, the timeout of "
            "torchrun's collectives), since with less they take busy workers for lost."
        ),
    ]


def _add_figures(report: benchmark.Report, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add what the storms of each side came to: figures, goals and a table."""
    for name, storms in found.items():
        report.add(f"{name}: goodput", "", [one["goodput"] for one in storms])
    report.add(
        "ours: `goodput` of result.json, with the calm before and after",
        "",
        [one["result_goodput"] for one in found["ours"]],
    )
    for name, storms in found.items():
        kills = [kill for one in storms for kill in one["kills"]]
        for kind in ("SIGKILL", "SIGSTOP"):
            times = [kill["next_step_s"] for kill in kills if kill["kind"] == kind and kill["next_step_s"] is not None]
            if times:
                report.add(f"{name}: {kind} to the next step that counts", "s", times)
    lost = statistics.median(1 - one["goodput"] for one in found["ours"])
    report.goal("part of the time that is lost, with one spare", lost, round(1 - _GOAL, 2))
    report.goal("bytes of the weights that differ", max(one["differing_bytes"] for one in found["ours"]), 0)
    report.table(
        ["side", "kills", "steps that counted", "a step", "goodput", "at the end"],
        [
            [
                name,
                str(len(one["kills"])),
                str(one["steps"]),
                f"{one['step_s'] * 1000:.0f} ms",
                f"{one['goodput']:.3f}",
                "trains" if one["gave_up"] is None else "has given up",
            ]
            for name, storms in found.items()
            for one in storms
        ],
    )


def _add_options(parser: Any) -> None:
    parser.add_argument("--kills", type=int, default=200, help="number of kills of our storm")
    parser.add_argument("--peer-kills", type=int, default=20, help="the most kills of the storm of a peer")
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=_PEERS, help="peers that are measured as well")
    parser.add_argument("--period-s", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--hang-timeout-s", type=float, default=0.7, help="patience with a silent worker")


if __name__ == "__main__":
    benchmark.run(
        "storm",
        "Four workers, one killed every 5 s by SIGKILL, memory and SIGSTOP in turn: how much of the time counted.",
        measure,
        _add_options,
    )
