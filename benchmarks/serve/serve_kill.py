"""SIGKILL of one of two replicas under load: requests that fail, and how soon latency is back."""

from __future__ import annotations

import math
import os
import signal
import statistics
from dataclasses import dataclass
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE, _REPLICAS = 0.020, 0.0005, 32, 2
_RATE_PER_S = 500.0
_BEFORE_S, _AFTER_S = 8.0, 20.0
_BEFORE_QUICK_S, _AFTER_QUICK_S = 3.0, 10.0
_WARM_UP_S = 2.0
_WINDOW_S, _EACH_S = 1.0, 0.25
_BACK = 1.5
"""Latency is back when no window's p99 is more than this factor times that of the windows before."""
_GOAL_S = 3.0
_REPLICA_PROCESS = "ray::ServeReplica:"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import OpenLoop

    before_s, after_s = (_BEFORE_QUICK_S, _AFTER_QUICK_S) if options.quick else (_BEFORE_S, _AFTER_S)
    rounds = options.rounds(5)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "replicas": _REPLICAS}
    report.settings |= {"rate_per_s": _RATE_PER_S, "before_s": before_s, "after_s": after_s, "rounds": rounds}
    start = sides.ours(options, _A_S, _C_S, replicas=_REPLICAS)
    failed, back_s, details = [], [], []
    high_before: list[float] = []
    for number in range(rounds):
        benchmark.say(f"round {number + 1}/{rounds}")
        with start() as endpoint:
            killed_s: list[float] = []

            def kill(progress: Any, endpoint: sides.Endpoint = endpoint, killed_s: list[float] = killed_s) -> None:
                if not killed_s and progress.now_s >= _WARM_UP_S + before_s:
                    killed_s.append(progress.now_s)
                    os.kill(_replica(endpoint), signal.SIGKILL)

            load = OpenLoop(_RATE_PER_S)
            measured = endpoint.load(load, before_s + after_s, warm_up_s=_WARM_UP_S, on_progress=kill)
        failed.append(float(measured.num_failed))
        found = _after_kill(measured, killed_s[0])
        back_s.append(found.back_s)
        high_before.append(found.high_before)
        details.append({"killed_s": killed_s[0], **measured.summary()})
    report.add("failed requests", "requests", failed)
    report.add("from the kill until p99 is back", "s", back_s)
    report.add("windows before the kill whose p99 is as high", "%", [100 * share for share in high_before])
    report.goal("failed requests, all rounds", sum(failed), 0, "requests")
    report.goal("from the kill until p99 is back, the longest of all rounds", max(back_s), _GOAL_S, "s")
    report.notes.append(
        f"Back: the moment from which every window of {_WINDOW_S:g} s, one begins each {_EACH_S:g} s, has a p99 of at "
        f"most {_BACK} times the median p99 of the windows before the kill. How many of those before it had more says "
        "what the machine does by itself."
    )
    report.details = {"rounds": details}


def _replica(endpoint: sides.Endpoint) -> int:
    """Return the process id of one replica: an actor's process with the model in it."""
    found = []
    for process in endpoint.processes():
        line = " ".join(process.cmdline())
        if line.startswith(_REPLICA_PROCESS):
            found.append((line, process.pid))
    if not found:
        raise benchmark.BenchmarkError("the endpoint has no process of a replica")
    line, pid = min(found)
    benchmark.say(f"  SIGKILL of {line}, process {pid}")
    return pid


@dataclass(frozen=True)
class _Found:
    """Latency around the kill."""

    back_s: float
    """From the kill to the moment from which no window's p99 is too high; 0 where none is."""
    high_before: float
    """Share of the windows before the kill whose p99 is too high as well."""


def _after_kill(measured: Any, killed_s: float) -> _Found:
    """Hold windows of the load, by when requests were due, against those that were over before the kill."""
    plan, before_s, after_s = measured.plan, {}, {}
    for number in range(round((plan.duration_s - _WINDOW_S) / _EACH_S) + 1):
        begin_s = plan.warm_up_s + number * _EACH_S
        end_s = begin_s + _WINDOW_S
        latency = measured.tally.between(begin_s, end_s)
        (before_s if end_s <= killed_s else after_s)[begin_s] = latency.quantile_s(0.99) if latency.num else math.inf
    limit_s = _BACK * statistics.median(before_s.values())
    # The first of what a window has is what the next one lacks: where that is good, what was too high came before.
    high_s = [begin_s + _EACH_S for begin_s, p99_s in after_s.items() if p99_s > limit_s]
    num_high_before = sum(p99_s > limit_s for p99_s in before_s.values())
    return _Found(max(0.0, max(high_s, default=0.0) - killed_s), num_high_before / len(before_s))


if __name__ == "__main__":
    benchmark.run("serve_kill", "SIGKILL of one of two replicas under load.", measure)
