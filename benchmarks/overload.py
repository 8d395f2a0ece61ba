"""Goodput above capacity with an objective of 100 ms: requests that cannot be in time are refused.

First in virtual time, where the model is all that takes time; then over HTTP with a model that takes none, where
reading and refusing requests is all there is to do, on the cores that the load generator needs too.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import harness
import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE = 0.020, 0.0005, 32
_ALLOW_S = 0.100
_LOADS = (0.95, 1.2, 2.0, 4.0)
_SECONDS, _SECONDS_QUICK, _WARM_UP_S = 8.0, 2.0, 1.0
_GOODPUT, _LATE = 0.97, 0.005
_CLIENTS = 32
_HTTP_LOADS = (1.2, 2.0, 4.0)
_HTTP_SECONDS, _HTTP_SECONDS_QUICK, _HTTP_WARM_UP_S = 6.0, 2.0, 2.0


def measure(report: harness.Report, options: harness.Options) -> None:
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    capacity_per_s = _MAX_BATCH_SIZE / (_A_S + _C_S * _MAX_BATCH_SIZE)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "objective_s": _ALLOW_S}
    report.settings["seconds"] = seconds
    rows = []
    for load in _LOADS:
        harness.say(f"{load:g} times capacity")
        trace = _run(load * capacity_per_s, seconds)
        goodput_per_s = len(trace.between(_WARM_UP_S, seconds)) / (seconds - _WARM_UP_S)
        report.add(f"{load:g}x capacity: goodput", "1/s", [goodput_per_s])
        if load > 1:
            reached = goodput_per_s / capacity_per_s
            report.goal(f"{load:g}x capacity: share of capacity lost", 1 - reached, round(1 - _GOODPUT, 3))
        late = trace.num_late / max(1, trace.num_offered)
        report.goal(f"{load:g}x capacity: late answers", late, _LATE)
        shown = [f"{load:g}", f"{goodput_per_s:.0f}", f"{goodput_per_s / capacity_per_s:.1%}"]
        shown += [f"{trace.num_refused}", f"{trace.num_late}", f"{trace.quantile_s(0.99) * 1e3:.1f}"]
        rows.append(shown)
    report.table(["offered / capacity", "goodput, 1/s", "of capacity", "refused", "late", "p99 of answers, ms"], rows)
    report.notes.append(
        f"Capacity is {capacity_per_s:.0f} requests/s: full batches without a pause. Late is what was run and was not "
        "answered in time, or was answered after its deadline."
    )
    _measure_http(report, options)


def _run(rate_per_s: float, seconds: float) -> Any:
    from orchestray.serving.batching import Adaptive
    from orchestray.serving.batching.simulation import Service, poisson, simulate

    return simulate(
        Adaptive(),
        Service(_A_S, _C_S),
        lambda run: run.open_loop(poisson(rate_per_s, random.Random(1)), seconds),
        max_batch_size=_MAX_BATCH_SIZE,
        warm_up_s=_WARM_UP_S,
        allow_s=_ALLOW_S,
    )


@dataclasses.dataclass
class _OverHttp:
    """What came of one load on an endpoint, round by round."""

    goodput: list[float] = dataclasses.field(default_factory=list)
    """Requests a second that were answered in time."""
    of_capacity: list[float] = dataclasses.field(default_factory=list)
    late: list[float] = dataclasses.field(default_factory=list)
    offered: list[float] = dataclasses.field(default_factory=list)
    """Times the capacity of the same round: the load generator may send less than it was asked to."""
    own_cpu: list[float] = dataclasses.field(default_factory=list)
    """Microseconds of the endpoint's processes, for each request offered."""
    generator_cpu: list[float] = dataclasses.field(default_factory=list)
    """Of a core."""


def _measure_http(report: harness.Report, options: harness.Options) -> None:
    """Capacity and overloads in turns, on one endpoint."""
    from orchestray.serving.load import ClosedLoop, OpenLoop

    seconds = _HTTP_SECONDS_QUICK if options.quick else _HTTP_SECONDS
    rounds = options.rounds(5)
    found = {load: _OverHttp() for load in _HTTP_LOADS}
    capacities_per_s, answer_us = [], []
    with sides.ours(options, 0.0, 0.0)() as endpoint:
        for number in range(rounds):
            harness.say(f"over HTTP, round {number + 1}/{rounds}")
            measured, own_us = _put(endpoint, ClosedLoop(_CLIENTS), seconds)
            capacity_per_s = measured.answered_per_s
            capacities_per_s.append(capacity_per_s)
            answer_us.append(own_us)
            for load, one in found.items():
                measured, own_us = _put(endpoint, OpenLoop(load * capacity_per_s), seconds)
                _note(one, measured, own_us, capacity_per_s)
    report.settings |= {"http_clients": _CLIENTS, "http_seconds": seconds, "http_rounds": rounds}
    report.add(f"HTTP, {_CLIENTS} clients: capacity", "1/s", capacities_per_s)
    report.add("HTTP: CPU of the endpoint, an answer", "us", answer_us)
    rows = []
    for load, one in found.items():
        goodput = report.add(f"HTTP, {load:g}x capacity: goodput", "1/s", one.goodput)
        share = report.add(f"HTTP, {load:g}x capacity: goodput of capacity", "", one.of_capacity)
        late = report.add(f"HTTP, {load:g}x capacity: late answers", "", one.late)
        own = report.add(f"HTTP, {load:g}x capacity: CPU of the endpoint, a request offered", "us", one.own_cpu)
        sent = report.add(f"HTTP, {load:g}x capacity: offered / capacity", "", one.offered)
        busy = report.add(f"HTTP, {load:g}x capacity: load generator", "cores", one.generator_cpu)
        report.goal(f"HTTP, {load:g}x capacity: late answers", late.median, _LATE)
        shown = [f"HTTP, {load:g}", f"{sent.median:.2f}", f"{goodput.median:.0f}", f"{share.median:.1%}"]
        rows.append([*shown, f"{late.median:.2%}", f"{own.median:.0f}", f"{busy.median:.2f}"])
    header = ["asked / capacity", "offered / capacity", "goodput, 1/s", "of capacity", "late"]
    report.table([*header, "endpoint, us of CPU a request", "load generator, cores"], rows)
    report.notes.append(
        f"HTTP: capacity is what {_CLIENTS} clients get that each wait for their answers, of a model that takes no "
        "time, in the same round. To read and refuse a request takes CPU too, of the one core that answers: the loss "
        "that follows from that has no goal. Late is what came after its time, by when it was due, or was answered 504."
    )


def _put(endpoint: sides.Endpoint, load: Any, seconds: float) -> tuple[Any, float]:
    """What came of a load whose requests have deadlines, and microseconds of the endpoint's CPU for each of them."""
    from orchestray.serving.load import ClosedLoop, Plan, measure

    is_open = not isinstance(load, ClosedLoop)
    headers = (("X-Request-Timeout-Ms", f"{_ALLOW_S * 1e3:.0f}"),) if is_open else ()
    target = dataclasses.replace(endpoint.target(), headers=headers)
    deadline_s = _ALLOW_S if is_open else None
    plan = Plan(target, load, duration_s=seconds, warm_up_s=_HTTP_WARM_UP_S, timeout_s=60.0, deadline_s=deadline_s)
    processes = endpoint.processes()
    before_s = sides.cpu_s(processes)
    measured = measure(plan, num_processes=1)
    used_s = sides.cpu_s(processes) - before_s
    endpoint.running.check_alive()
    num = measured.offered_per_s * (seconds + _HTTP_WARM_UP_S)
    return measured, used_s / max(1.0, num) * 1e6


def _note(one: _OverHttp, measured: Any, own_us: float, capacity_per_s: float) -> None:
    tally = measured.tally
    num_late = tally.latency.num - tally.num_in_time + tally.statuses[504]
    one.goodput.append(measured.goodput_per_s)
    one.of_capacity.append(measured.goodput_per_s / capacity_per_s)
    one.late.append(num_late / max(1, tally.num_offered))
    one.offered.append(measured.offered_per_s / capacity_per_s)
    one.own_cpu.append(own_us)
    one.generator_cpu.append(max(measured.cpu_shares))


if __name__ == "__main__":
    harness.run("overload", "Goodput at and above capacity, with an objective of 100 ms for each request.", measure)
