"""SIGKILL of processes of an endpoint under load: requests that fail, and how soon latency, or an answer, is back.

A replica, and Ray Serve's controller: an open loop goes on. The ingress, which listens: clients that ask again.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
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
_GOAL_S, _OF_SERVE = 3.0, 1.0
_REPLICA = "ray::ServeReplica:"
_VICTIMS = {"a replica": (_REPLICA, ":timed-"), "the controller": ("ray::ServeController",)}
_NUM_CLIENTS = 4
_RETRY_S = 0.01
_PATIENCE_S = 60.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    before_s, after_s = (_BEFORE_QUICK_S, _AFTER_QUICK_S) if options.quick else (_BEFORE_S, _AFTER_S)
    rounds = options.rounds(5)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "replicas": _REPLICAS}
    report.settings |= {"rate_per_s": _RATE_PER_S, "before_s": before_s, "after_s": after_s, "rounds": rounds}
    report.settings |= {"clients_of_the_ingress": _NUM_CLIENTS}
    start = sides.ours(options, _A_S, _C_S, replicas=_REPLICAS)
    found: dict[str, list[_Found]] = {name: [] for name in _VICTIMS}
    restarts: dict[str, list[_Restart]] = {"orchestray": [], "Ray Serve": []}
    endpoints = {"orchestray": start, "Ray Serve": sides.ray(options, "plain", _A_S, _C_S)}
    for number in range(rounds):
        benchmark.say(f"round {number + 1}/{rounds}")
        for name, of in found.items():
            with start() as endpoint:
                of.append(_under_open_loop(endpoint, _VICTIMS[name], before_s, after_s))
        for name, restarted in restarts.items():
            with endpoints[name]() as endpoint:
                words = (_REPLICA, ":ingress" if name == "orchestray" else ":Plain")
                restarted.append(_with_clients_that_retry(endpoint, words, before_s))
    _tell(report, found, restarts)


def _tell(report: benchmark.Report, found: dict[str, list[_Found]], restarts: dict[str, list[_Restart]]) -> None:
    for name, of in found.items():
        report.add(f"{name} killed: failed requests", "requests", [float(each.num_failed) for each in of])
        report.add(f"{name} killed: until p99 is back", "s", [each.back_s for each in of])
        report.add(f"{name}: windows before with as high a p99", "%", [100 * each.high_before for each in of])
        report.goal(f"{name} killed: failed requests, all rounds", sum(each.num_failed for each in of), 0, "requests")
        longest_s = max(each.back_s for each in of)
        report.goal(f"{name} killed: until p99 is back, the longest of all rounds", longest_s, _GOAL_S, "s")
    for name, of_side in restarts.items():
        report.add(f"{name}, what listens or answers killed: until an answer", "s", [one.back_s for one in of_side])
        report.add(f"{name}, the same: requests lost", "requests", [float(one.num_lost) for one in of_side])
    ours, peer = ([one.back_s for one in restarts[name]] for name in ("orchestray", "Ray Serve"))
    ratio = report.compare("ingress killed: until an answer / Ray Serve's only replica killed", ours, peer)
    report.goal("ingress killed: until an answer / Ray Serve's only replica killed", ratio, _OF_SERVE)
    lost = sum(one.num_lost for one in restarts["orchestray"])
    report.goal("ingress killed: lost requests of clients that ask again, all rounds", lost, 0, "requests")
    report.notes.append(
        f"Back: the moment from which every window of {_WINDOW_S:g} s, one begins each {_EACH_S:g} s, has a p99 of at "
        f"most {_BACK} times the median p99 of the windows before the kill. How many of those before it had more says "
        "what the machine does by itself."
    )
    report.notes.append(
        "The ingress listens: while there is none, connections are refused, and clients ask again every "
        f"{_RETRY_S * 1e3:g} ms. Ray Serve's proxy listens meanwhile, and its replica is a plain deployment; a client "
        "of it asks again after a refusal or a status of 500 and more."
    )
    report.details = {name: [each.summary for each in of] for name, of in found.items()}


def _killed(endpoint: sides.Endpoint, words: tuple[str, ...]) -> None:
    """Kill a process whose command line begins with the first word, and has the others in it."""
    found = []
    for process in endpoint.processes():
        line = " ".join(process.cmdline())
        if line.startswith(words[0]) and all(word in line for word in words[1:]):
            found.append((line, process.pid))
    if not found:
        raise benchmark.BenchmarkError(f"the endpoint has no process {' '.join(words)}")
    line, pid = min(found)
    benchmark.say(f"  SIGKILL of {line.strip()}, process {pid}")
    os.kill(pid, signal.SIGKILL)


# -- an open loop ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """Latency around the kill."""

    back_s: float
    """From the kill to the moment from which no window's p99 is too high; 0 where none is."""
    high_before: float
    """Share of the windows before the kill whose p99 is too high as well."""
    num_failed: int
    summary: dict[str, Any]


def _under_open_loop(endpoint: sides.Endpoint, words: tuple[str, ...], before_s: float, after_s: float) -> _Found:
    from orchestray.loadtest import OpenLoop

    killed_s: list[float] = []

    def kill(progress: Any) -> None:
        if not killed_s and progress.now_s >= _WARM_UP_S + before_s:
            killed_s.append(progress.now_s)
            _killed(endpoint, words)

    load = OpenLoop(_RATE_PER_S)
    measured = endpoint.load(load, before_s + after_s, warm_up_s=_WARM_UP_S, on_progress=kill)
    return _after_kill(measured, killed_s[0])


def _after_kill(measured: Any, killed_s: float) -> _Found:
    """Hold windows of the load, by when requests were due, against those that were over before the kill."""
    plan, before_s, after_s = measured.plan, {}, {}
    for number in range(round((plan.duration_s - _WINDOW_S) / _EACH_S) + 1):
        begin_s = plan.warm_up_s + number * _EACH_S
        end_s = begin_s + _WINDOW_S
        latency = measured.tally.between(begin_s, end_s).latency
        (before_s if end_s <= killed_s else after_s)[begin_s] = latency.quantile_s(0.99) if latency.num else math.inf
    limit_s = _BACK * statistics.median(before_s.values())
    # The first of what a window has is what the next one lacks: where that is good, what was too high came before.
    high_s = [begin_s + _EACH_S for begin_s, p99_s in after_s.items() if p99_s > limit_s]
    num_high_before = sum(p99_s > limit_s for p99_s in before_s.values())
    return _Found(
        max(0.0, max(high_s, default=0.0) - killed_s),
        num_high_before / len(before_s),
        measured.num_failed,
        {"killed_s": killed_s, **measured.summary()},
    )


# -- clients that ask again --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Restart:
    back_s: float
    """From the kill to the first answer to a request that was sent after it."""
    num_lost: int
    """Requests that were answered wrongly, or never."""


def _with_clients_that_retry(endpoint: sides.Endpoint, words: tuple[str, ...], before_s: float) -> _Restart:
    answered: list[tuple[float, float]] = []
    lost: list[str] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            began_s = time.monotonic()
            try:
                _until_answered(lambda: sides.ask(endpoint), began_s + _PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - counted
                lost.append(str(error))
            else:
                answered.append((began_s, time.monotonic()))

    threads = [threading.Thread(target=work) for _ in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(before_s)
    _killed(endpoint, words)
    killed_s = time.monotonic()
    until_s = killed_s + _PATIENCE_S
    while time.monotonic() < until_s and not _first_after(answered, killed_s):
        time.sleep(_RETRY_S)
    time.sleep(_WINDOW_S)
    over.set()
    for thread in threads:
        thread.join()
    back_s = min(_first_after(answered, killed_s), default=math.inf) - killed_s
    benchmark.say(f"  {endpoint.name}: an answer after {back_s:.2f} s, {len(lost)} of {len(answered)} lost {lost[:1]}")
    return _Restart(back_s, len(lost))


def _first_after(answered: list[tuple[float, float]], killed_s: float) -> list[float]:
    """Return the ends of requests that were sent after the kill."""
    return [end_s for began_s, end_s in list(answered) if began_s > killed_s]


def _until_answered(ask: Callable[[], bool], until_s: float) -> None:
    from orchestray.loadtest import EndpointError

    while True:
        try:
            if ask():
                return
        except (EndpointError, benchmark.BenchmarkError):
            if time.monotonic() > until_s:
                raise
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    benchmark.run("serve_kill", "SIGKILL of one of an endpoint's processes under load.", measure)
