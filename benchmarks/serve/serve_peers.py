"""Latency and requests/s of one model in BentoML, LitServe and `orchestray serve`: open loops, and 8 and 32 clients."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_RATES_PER_S = (30.0, 90.0, 267.0)
_CLIENTS = (8, 32)
_CLOSED = tuple(f"{count} clients" for count in _CLIENTS)
_TIMEOUTS_S = (0.0, 0.002, 0.005, 0.010, 0.020)
_TIMEOUTS_QUICK_S = (0.0, 0.005)
_SECONDS, _SECONDS_QUICK = 10.0, 1.5
_IDLE_S, _IDLE_QUICK_S = 5.0, 1.0
_WARM_UP_S = 3.0
"""BentoML learns from its first requests."""

_OURS, _BENTOML = "orchestray", "BentoML"
_MEAN, _THROUGHPUT, _P50, _IDLE = 0.7, 1 / 1.5, 0.75, 0.02

Found = dict[str, dict[str, list[Any]]]


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import ClosedLoop, OpenLoop

    python = sides.peers_python(options)
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    rounds = options.rounds(5)
    timeouts_s = _TIMEOUTS_QUICK_S if options.quick else _TIMEOUTS_S
    report.settings = {"rates_per_s": _RATES_PER_S, "clients": _CLIENTS, "seconds": seconds, "rounds": rounds}
    report.settings |= {"a_s": sides.A_S, "c_s": sides.C_S, "max_batch_size": sides.MAX_BATCH_SIZE}
    report.settings |= sides.peer_versions(python)
    litserve = {f"LitServe, timeout {timeout_s * 1e3:g} ms": timeout_s for timeout_s in timeouts_s}
    starts: dict[str, sides.Side] = {_OURS: sides.ours(options), _BENTOML: sides.bentoml(options, python)}
    for name, timeout_s in litserve.items():
        starts[name] = sides.litserve(options, python, batch_timeout_s=timeout_s)
    loads: dict[str, Any] = {name: ClosedLoop(count) for name, count in zip(_CLOSED, _CLIENTS, strict=True)}
    loads |= {f"{rate:g}/s": OpenLoop(rate) for rate in _RATES_PER_S}
    # LitServe's timeouts are distinguished by the clients alone; the open loops are those of BentoML.
    found: Found = {name: {load: [] for load in (_CLOSED if name in litserve else loads)} for name in starts}
    idle: dict[str, list[float]] = {name: [] for name in starts}

    def run(name: str) -> None:
        with starts[name]() as endpoint:
            idle[name].append(endpoint.cpu_share(_IDLE_QUICK_S if options.quick else _IDLE_S))
            for load, runs in found[name].items():
                runs.append(endpoint.load(loads[load], seconds, warm_up_s=_WARM_UP_S))

    benchmark.alternate({name: partial(run, name) for name in starts}, rounds, benchmark.say)
    _tell(report, found, idle)
    _hold(report, found, idle, list(litserve))


def _tell(report: benchmark.Report, found: Found, idle: dict[str, list[float]]) -> None:
    rows = []
    for name, loads in found.items():
        report.add(f"{name}: CPU while idle", "cores", idle[name])
        for load, runs in loads.items():
            means = report.add(f"{name}, {load}: mean", "ms", [sides.mean_ms(one) for one in runs])
            per_s = report.add(f"{name}, {load}: answered", "1/s", [one.answered_per_s for one in runs])
            quantiles = [
                report.add(
                    f"{name}, {load}: {quantile}", "ms", [one.tally.latency.quantile_s(share) * 1e3 for one in runs]
                )
                for quantile, share in (("p50", 0.5), ("p99", 0.99))
            ]
            rows.append([name, load, *(f"{one.median:.1f}" for one in (means, *quantiles)), f"{per_s.median:.0f}"])
        sides.note_limits(report, {f"{name}, {load}": runs for load, runs in loads.items()})
    report.table(["server", "load", "mean, ms", "p50", "p99", "answered/s"], rows)
    report.details = {
        name: {load: [one.summary() for one in runs] for load, runs in loads.items()} for name, loads in found.items()
    }


def _hold(report: benchmark.Report, found: Found, idle: dict[str, list[float]], litserve: list[str]) -> None:
    ours = found[_OURS]
    for load in found[_OURS]:
        mean, peer = ([sides.mean_ms(one) for one in found[name][load]] for name in (_OURS, _BENTOML))
        ratio = report.compare(f"{load}: mean / BentoML", mean, peer)
        report.goal(f"{load}: mean / BentoML", ratio, _MEAN)
    for load in _CLOSED:
        per_s = [[one.answered_per_s for one in found[name][load]] for name in (_OURS, _BENTOML)]
        name = f"{load}: time a request / BentoML"
        report.goal(name, report.compare(name, *([1 / one for one in each] for each in per_s)), _THROUGHPUT)
        medians = {name: [one.tally.latency.quantile_s(0.5) for one in found[name][load]] for name in litserve}
        best = min(litserve, key=lambda name, medians=medians: statistics.median(medians[name]))  # type: ignore[misc]
        p50 = [one.tally.latency.quantile_s(0.5) for one in ours[load]]
        ratio = report.compare(f"{load}: p50 / {best}", p50, medians[best])
        report.goal(f"{load}: p50 / best of LitServe ({best})", ratio, _P50)
    report.goal("CPU while idle", statistics.median(idle[_OURS]), _IDLE, "cores")


if __name__ == "__main__":
    benchmark.run(
        "serve_peers",
        "One model (20 ms + 0.5 ms a sample, at most 32 a batch) in BentoML, LitServe and orchestray serve.",
        measure,
        sides.add_options,
    )
