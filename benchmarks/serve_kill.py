"""SIGKILL of one of two replicas under load: requests that fail, and how soon latency is back."""

from __future__ import annotations

import os
import signal
import statistics
from typing import Any

import harness
import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE, _REPLICAS = 0.020, 0.0005, 32, 2
_RATE_PER_S = 150.0
_BEFORE_S, _AFTER_S = 8.0, 20.0
_BEFORE_QUICK_S, _AFTER_QUICK_S = 3.0, 10.0
_WARM_UP_S = 2.0
_BACK = 1.5
"""Latency is back when no second's p99 is more than so many times that of the seconds before."""
_GOAL_S = 3.0
_REPLICA_PROCESS = "ray::ServeReplica:"


def measure(report: harness.Report, options: harness.Options) -> None:
    from orchestray.serving.load import OpenLoop

    before_s, after_s = (_BEFORE_QUICK_S, _AFTER_QUICK_S) if options.quick else (_BEFORE_S, _AFTER_S)
    rounds = options.rounds(5)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "replicas": _REPLICAS}
    report.settings |= {"rate_per_s": _RATE_PER_S, "before_s": before_s, "after_s": after_s, "rounds": rounds}
    start = sides.ours(options, _A_S, _C_S, replicas=_REPLICAS)
    failed, back_s, details = [], [], []
    for number in range(rounds):
        harness.say(f"round {number + 1}/{rounds}")
        with start() as endpoint:
            killed_s: list[float] = []

            def kill(progress: Any, endpoint: sides.Endpoint = endpoint, killed_s: list[float] = killed_s) -> None:
                if not killed_s and progress.now_s >= _WARM_UP_S + before_s:
                    killed_s.append(progress.now_s)
                    os.kill(_replica(endpoint), signal.SIGKILL)

            load = OpenLoop(_RATE_PER_S)
            measured = endpoint.load(load, before_s + after_s, warm_up_s=_WARM_UP_S, on_progress=kill)
        failed.append(float(measured.num_failed))
        back_s.append(_back_s(measured, killed_s[0]))
        details.append({"killed_s": killed_s[0], **measured.summary()})
    report.add("failed requests", "requests", failed)
    report.add("from the kill until p99 is back", "s", back_s)
    report.goal("failed requests, all rounds", sum(failed), 0, "requests")
    report.goal("from the kill until p99 is back", statistics.median(back_s), _GOAL_S, "s")
    report.notes.append(
        f"Back: the end of the last second whose p99 is more than {_BACK} times the median p99 of the seconds before "
        "the kill."
    )
    report.details = {"rounds": details}


def _replica(endpoint: sides.Endpoint) -> int:
    """Process id of one replica: an actor's process with the model in it."""
    found = []
    for process in endpoint.processes():
        line = " ".join(process.cmdline())
        if line.startswith(_REPLICA_PROCESS):
            found.append((line, process.pid))
    if not found:
        raise harness.BenchmarkError("the endpoint has no process of a replica")
    line, pid = min(found)
    harness.say(f"  SIGKILL of {line}, process {pid}")
    return pid


def _back_s(measured: Any, killed_s: float) -> float:
    """Seconds from the kill to the end of the last second whose p99 was too high; 0 where there is none."""
    seconds = measured.tally.seconds
    before = [
        one.latency.quantile_s(0.99) for number, one in seconds.items() if number + 1 <= killed_s and one.latency.num
    ]
    limit_s = _BACK * statistics.median(before)
    high = [
        number
        for number, one in seconds.items()
        if number + 1 > killed_s and (one.latency.num == 0 or one.latency.quantile_s(0.99) > limit_s)
    ]
    return max(0.0, max(high) + 1 - killed_s) if high else 0.0


if __name__ == "__main__":
    harness.run("serve_kill", "SIGKILL of one of two replicas under load.", measure)
