"""SIGKILL of a worker under a parameter server: updates a second of the others in the 3 s after, against before."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 120.0
_WORKERS = 3
_SHARE_S = 0.03
_WINDOW_S = 3.0
_LIMIT = 1 / 0.9
_INTERRUPTED = 130


def kill_one(place: Path, *, spares: int) -> dict[str, Any]:
    """Run until a worker has been killed and the window is over; updates of the others a second before and after."""
    config = {
        "name": "run",
        "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:TimedDigits", "seconds_a_share": _SHARE_S},
        # A sample a share: a step, and so a line of metrics, is as many updates as there are workers.
        "train": {
            "batch_size": _WORKERS,
            "steps": 10_000_000,
            "optimizer": {"type": "sgd", "lr": 0.001},
            "validate_every_steps": 10_000_000,
        },
        "strategy": {
            "network": {"data": _WORKERS},
            "exchange": {"type": "parameter_server", "consistency": "asynchronous"},
        },
        "checkpoint": {"every_steps": 10_000_000},
        "resources": {"cpus_per_worker": 0.25, "spares": spares},
        "max_restarts": 10,
    }
    told = commands.write_json(place / "config.yaml", config)  # JSON is YAML
    command = [commands.script("orchestray"), "train", str(told), "--runs-dir", str(place), "--quiet"]
    run = place / "run"
    with commands.running(command) as under_way:
        under_way.wait_until(lambda: len(commands.step_lines(run)) > 5, _TIMEOUT_S, "the fifth step")
        time.sleep(2 * _WINDOW_S)
        actors = json.loads((run / "actors.json").read_text(encoding="utf-8"))
        pid = next(actor["pid"] for actor in actors if actor["role"] == "worker" and actor["rank"] == 1)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        time.sleep(2 * _WINDOW_S)
        under_way.interrupt()
        under_way.wait(_TIMEOUT_S, statuses=(_INTERRUPTED,))
        began_at = under_way.began_at
    at = [line["time_s"] + began_at - killed_at for line in commands.step_lines(run)]
    before = _WORKERS * sum(-_WINDOW_S < when <= 0 for when in at) / _WINDOW_S
    after = _WORKERS * sum(0 < when <= _WINDOW_S for when in at) / _WINDOW_S
    return {"before": before * (_WORKERS - 1) / _WORKERS, "after": after}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    found: list[dict[str, Any]] = []

    def call() -> None:
        place = options.workspace / str(len(found))
        place.mkdir()
        found.append(kill_one(place, spares=0))

    benchmark.alternate({"ours": call}, rounds, benchmark.say)
    before, after = [one["before"] for one in found], [one["after"] for one in found]
    report.add("updates a second of the two others, before", "1/s", before)
    report.add("updates a second after", "1/s", after)
    name = "updates a second before / after"
    report.goal(name, report.compare(name, before, after), _LIMIT)
    report.settings = {"rounds": rounds, "workers": _WORKERS, "seconds_a_share": _SHARE_S, "window_s": _WINDOW_S}
    report.notes += [
        f"A worker sleeps {_SHARE_S:g} s for a share: the cores that the lost one frees make the others no faster.",
        "Before: two thirds of what three do. The new worker's process starts in the window, on the same cores.",
    ]


if __name__ == "__main__":
    benchmark.run(
        "worker_killed",
        "Updates a second of the other workers in the 3 s after one of three was killed, against before.",
        measure,
    )
