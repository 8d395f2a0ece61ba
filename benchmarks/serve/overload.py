"""Goodput above capacity with an objective of 100 ms: requests that cannot be in time are refused.

First in virtual time, where the model is all that takes time. Then over HTTP, of models that take long and short, where
capacity is the model's, and of one that takes no time: there reading and refusing requests is all there is to do, on
the cores that the load generator needs too.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE = 0.020, 0.0005, 32
_ALLOW_S = 0.100
_LOADS = (0.95, 1.2, 2.0, 4.0)
_SEEDS, _SEEDS_QUICK = (1, 2, 3, 4, 5), (1,)
_SECONDS, _SECONDS_QUICK, _WARM_UP_S = 8.0, 2.0, 1.0
_GOODPUT, _LATE = 0.97, 0.005
_FULL_CORE = 0.9
"""Share of a core from which the core bounds capacity, and not the model."""
_HTTP_LOADS = (1.2, 2.0, 4.0)
_HTTP_SECONDS, _HTTP_SECONDS_QUICK, _HTTP_WARM_UP_S = 6.0, 2.0, 2.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    capacity_per_s = _MAX_BATCH_SIZE / (_A_S + _C_S * _MAX_BATCH_SIZE)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "objective_s": _ALLOW_S}
    report.settings["seconds"] = seconds
    report.settings["seeds"] = seeds = _SEEDS_QUICK if options.quick else _SEEDS
    rows = []
    for load in _LOADS:
        benchmark.say(f"{load:g} times capacity")
        traces = [_run(load * capacity_per_s, seconds, seed) for seed in seeds]
        goodputs = [len(trace.between(_WARM_UP_S, seconds)) / (seconds - _WARM_UP_S) for trace in traces]
        goodput_per_s = report.add(f"{load:g}x capacity: goodput", "1/s", goodputs).median
        if load > 1:
            reached = goodput_per_s / capacity_per_s
            report.goal(f"{load:g}x capacity: share of capacity lost", 1 - reached, round(1 - _GOODPUT, 3))
        late = max(trace.num_late / max(1, trace.num_offered) for trace in traces)
        refused = statistics.median(trace.num_refused / max(1, trace.num_offered) for trace in traces)
        p99_ms = statistics.median(trace.quantile_s(0.99) * 1e3 for trace in traces)
        report.goal(f"{load:g}x capacity: late answers", late, _LATE)
        shown = [f"{load:g}", f"{goodput_per_s:.0f}", f"{goodput_per_s / capacity_per_s:.1%}"]
        rows.append([*shown, f"{refused:.1%}", f"{late:.2%}", f"{p99_ms:.1f}"])
    report.table(["offered / capacity", "goodput, 1/s", "of capacity", "refused", "late", "p99 of answers, ms"], rows)
    report.notes.append(
        f"Capacity is {capacity_per_s:.0f} requests/s: full batches without a pause. Late is what was run and was not "
        "answered in time, or was answered after its deadline."
    )
    _measure_http(report, options)


def _run(rate_per_s: float, seconds: float, seed: int) -> Any:
    from lab.batching_simulation import Service, simulate
    from orchestray.loadtest.arrivals import poisson
    from orchestray.serving.batching import Adaptive

    return simulate(
        Adaptive(),
        Service(_A_S, _C_S),
        lambda run: run.open_loop(poisson(rate_per_s, random.Random(seed)), seconds),
        max_batch_size=_MAX_BATCH_SIZE,
        warm_up_s=_WARM_UP_S,
        allow_s=_ALLOW_S,
    )


@dataclasses.dataclass(frozen=True)
class _Model:
    """Model that is served over HTTP."""

    name: str
    a_s: float
    c_s: float
    num_clients: int
    """That find its capacity: two batches of them where one is read while another is run."""
    rounds: int


_MODELS = (
    _Model("20 ms + 0.5 ms b", _A_S, _C_S, 2 * _MAX_BATCH_SIZE, 5),
    _Model("2 ms + 0.05 ms b", 0.002, 0.00005, 2 * _MAX_BATCH_SIZE, 5),
    _Model("no time", 0.0, 0.0, _MAX_BATCH_SIZE, 5),
)


@dataclasses.dataclass
class _OverHttp:
    """Measurements of one load on an endpoint, round by round."""

    goodput: list[float] = dataclasses.field(default_factory=list)
    """Requests a second that were answered in time."""
    lost: list[float] = dataclasses.field(default_factory=list)
    """Loss as a part of the capacity in the same round."""
    late: list[float] = dataclasses.field(default_factory=list)
    offered: list[float] = dataclasses.field(default_factory=list)
    """Times the capacity of the same round: the load generator may send less than it was asked to."""
    own_cpu: list[float] = dataclasses.field(default_factory=list)
    """Cores of the endpoint's processes."""
    refusal_us: list[float] = dataclasses.field(default_factory=list)
    """CPU of the endpoint for each request that it did not answer, where an answer takes what it takes at capacity."""
    generator_cpu: list[float] = dataclasses.field(default_factory=list)
    """Share of a core that the generator took."""


@dataclasses.dataclass(frozen=True)
class _Put:
    """Measurements of one load, once."""

    measured: Any
    own_cores: float
    """Cores that the endpoint's processes took while it lasted."""


def _measure_http(report: benchmark.Report, options: benchmark.Options) -> None:
    """Measure capacity and overloads in turns, on one endpoint for each model."""
    seconds = _HTTP_SECONDS_QUICK if options.quick else _HTTP_SECONDS
    report.settings |= {"http_seconds": seconds}
    rows: list[list[str]] = []
    for model in _MODELS:
        rows += _measure_model(report, options, model, seconds)
    header = ["model", "asked / capacity", "offered / capacity", "goodput, 1/s", "of capacity", "late"]
    header += ["endpoint, cores", "CPU of a refusal, us", "possible at that", "load generator, cores"]
    report.table(header, rows)
    report.notes.append(
        "HTTP: capacity is what clients get that each wait for their answers, in the same round: "
        f"{2 * _MAX_BATCH_SIZE} (two batches) of the models that take time, {_MAX_BATCH_SIZE} of the one that takes "
        "none. Late is what came after its time, by when it was due, or was answered 504. The endpoint and the load "
        "generator share the machine's cores; what each takes of them is given. To read and refuse a request takes CPU "
        "too, of the one core that answers. Possible is what is left for answers of a core that was full at capacity: "
        "with r the CPU of a refusal, s that of an answer and L the load, (1 - L r / s) / (1 - r / s)."
    )


def _measure_model(
    report: benchmark.Report, options: benchmark.Options, model: _Model, seconds: float
) -> list[list[str]]:
    from orchestray.loadtest import ClosedLoop, OpenLoop

    found = {load: _OverHttp() for load in _HTTP_LOADS}
    capacities_per_s, answer_us = [], []
    rounds = options.rounds(model.rounds)
    with sides.ours(options, model.a_s, model.c_s)() as endpoint:
        for number in range(rounds):
            benchmark.say(f"over HTTP, {model.name}, round {number + 1}/{rounds}")
            full = _put(endpoint, ClosedLoop(model.num_clients), seconds)
            capacities_per_s.append(full.measured.answered_per_s)
            answer_us.append(full.own_cores / full.measured.answered_per_s * 1e6)
            for load, one in found.items():
                _note(one, _put(endpoint, OpenLoop(load * capacities_per_s[-1]), seconds), full)
    name = f"HTTP, {model.name}"
    report.add(f"{name}: capacity", "1/s", capacities_per_s)
    answer = report.add(f"{name}: CPU of the endpoint, an answer", "us", answer_us)
    rows = []
    for load, one in found.items():
        at = f"{name}, {load:g}x capacity"
        goodput = report.add(f"{at}: goodput", "1/s", one.goodput)
        lost = report.add(f"{at}: share of capacity lost", "", one.lost)
        late = report.add(f"{at}: late answers", "", one.late)
        own = report.add(f"{at}: endpoint", "cores", one.own_cpu)
        refusal = report.add(f"{at}: CPU of the endpoint, a refusal", "us", one.refusal_us)
        sent = report.add(f"{at}: offered / capacity", "", one.offered)
        busy = report.add(f"{at}: load generator", "cores", one.generator_cpu)
        report.goal(f"{at}: share of capacity lost", lost.median, round(1 - _GOODPUT, 3))
        report.goal(f"{at}: late answers", late.median, _LATE)
        part = refusal.median / answer.median
        possible = min(1.0, max(0.0, (1 - load * part) / (1 - part))) if 0 < part < 1 else 1.0
        is_full = answer.median * max(capacities_per_s) / 1e6 > _FULL_CORE
        shown = [model.name, f"{load:g}", f"{sent.median:.2f}", f"{goodput.median:.0f}", f"{1 - lost.median:.1%}"]
        shown += [f"{late.median:.2%}", f"{own.median:.2f}", f"{refusal.median:.0f}"]
        rows.append([*shown, f"{possible:.0%}" if is_full else "", f"{busy.median:.2f}"])
    return rows


def _put(endpoint: sides.Endpoint, load: Any, seconds: float) -> _Put:
    """Put a load on an endpoint; where clients do not wait for answers, requests have deadlines."""
    from orchestray.loadtest import ClosedLoop, Plan, measure

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
    return _Put(measured, used_s / (seconds + _HTTP_WARM_UP_S))


def _note(one: _OverHttp, put: _Put, full: _Put) -> None:
    measured, tally = put.measured, put.measured.tally
    capacity_per_s = full.measured.answered_per_s
    num_late = tally.latency.num - tally.num_in_time + tally.statuses[504]
    answered_per_s = tally.latency.num / measured.plan.duration_s
    refused_per_s = measured.offered_per_s - answered_per_s
    answering_cores = answered_per_s / capacity_per_s * full.own_cores
    one.goodput.append(measured.goodput_per_s)
    one.lost.append(1 - measured.goodput_per_s / capacity_per_s)
    one.late.append(num_late / max(1, tally.num_offered))
    one.offered.append(measured.offered_per_s / capacity_per_s)
    one.own_cpu.append(put.own_cores)
    one.refusal_us.append(max(0.0, put.own_cores - answering_cores) / max(1.0, refused_per_s) * 1e6)
    one.generator_cpu.append(max(measured.cpu_shares))


if __name__ == "__main__":
    benchmark.run("overload", "Goodput at and above capacity, with an objective of 100 ms for each request.", measure)
