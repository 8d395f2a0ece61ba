"""Random mixes of trials that are whole gangs, with failures, kills and stops: none hangs, none leaves its group."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import harness

_MIXES = 200
_DEADLOCK_S = 300.0


def measure(report: harness.Report, options: harness.Options) -> None:
    tests = str(harness.REPOSITORY / "tests")
    sys.path.insert(0, tests)
    os.environ["PYTHONPATH"] = tests  # the processes of the trials find the tasks that misbehave
    from orchestray.platform.cluster.cluster import connect

    connect()
    taken_s, num_leaked, num_stuck = [], 0, 0
    for number in range(options.rounds(_MIXES, quick=4)):
        began_s = time.perf_counter()
        done = threading.Event()
        thread = threading.Thread(target=_mix, args=(number, options.workspace, done), daemon=True)
        thread.start()
        num_stuck += not done.wait(_DEADLOCK_S)
        num_leaked += _num_groups()
        taken_s.append(time.perf_counter() - began_s)
        harness.say(f"mix {number + 1}: {taken_s[-1]:.1f} s, {num_leaked} leaked, {num_stuck} stuck")
        if num_stuck:
            break
    report.settings = {"mixes": len(taken_s)}
    report.add("a mix", "s", taken_s)
    report.goal("deadlocks", float(num_stuck), 0.0)
    report.goal("leaked placement groups", float(num_leaked), 0.0)


def _mix(number: int, workspace: Path, done: threading.Event) -> None:
    from orchestray.platform.config.search.load import load_search_config
    from orchestray.platform.errors import OrchestrayError
    from orchestray.search.engine.run import run_search
    from orchestray.search.records.writer import SearchRecords

    rng = random.Random(number)
    stop = threading.Event()
    stops_after = rng.choice([None, None, 2, 5])
    seen: list[Any] = []

    def on_change(change: Any) -> None:
        seen.append(change)
        if stops_after is not None and len(seen) >= stops_after:
            stop.set()

    config = load_search_config(_config(rng, number))
    try:
        with SearchRecords.create(workspace, f"mix-{number}") as records:
            run_search(config, records, stop=stop, on_change=on_change)
    except OrchestrayError as error:
        harness.say(f"mix {number + 1}: {error}")  # a mix in which every trial fails
    finally:
        done.set()


def _config(rng: random.Random, number: int) -> dict[str, Any]:
    exchanges: list[dict[str, Any]] = [
        {"type": "allreduce"},
        {"type": "parameter_server"},
        {"type": "averaging", "every": 4},
    ]
    return {
        "name": f"mix-{number}",
        "base": {
            "name": "trial",
            "task": {"type": "support.odd_task:OddTask", "behaviour": "fine"},
            "train": {"batch_size": 8, "steps": 12, "optimizer": {"type": "sgd", "lr": 0.1}},
            "strategy": {"network": {"data": rng.choice([2, 2, 3])}, "exchange": rng.choice(exchanges)},
            "max_restarts": rng.choice([0, 1]),
        },
        "search": {
            "method": {"type": "grid"},
            "objective": {"metric": "accuracy"},
            "space": {
                "task.behaviour": {
                    "type": "choice",
                    "values": rng.sample(["fine", "raise", "killed", "slow", "fine again"], k=rng.choice([2, 3])),
                }
            },
            "parallel": rng.choice([1, 2]),
        },
    }


def _num_groups() -> int:
    from ray.util import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


if __name__ == "__main__":
    harness.run(
        "nested_trials",
        "Random mixes of nested trials, stops and kills: none hangs, and none leaves a placement group.",
        measure,
    )
