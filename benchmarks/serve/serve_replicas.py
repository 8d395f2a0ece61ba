"""Two replicas that pull batches from one queue, beside two that Ray Serve's own routing gives requests to.

And, for information, what two of ours answer beside one, when more clients ask than one can serve.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE, _REPLICAS = 0.060, 0.005, 16, 2
_LOADS = (0.60, 0.95)
_SECONDS, _SECONDS_QUICK = 40.0, 2.0
_FULL_SECONDS, _FULL_ROUNDS = 10.0, 3
"""Seconds and most rounds of a full load, whose throughput hardly varies."""
_GOAL = 0.85
_PULLING, _ROUTED = "orchestray", "Ray Serve's routing"
_CLIENTS = 3 * _REPLICAS * _MAX_BATCH_SIZE
"""Enough that neither number of replicas is ever without a full batch."""


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import ClosedLoop, OpenLoop

    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    rounds = options.rounds(5)
    capacity_per_s = _REPLICAS * _MAX_BATCH_SIZE / (_A_S + _C_S * _MAX_BATCH_SIZE)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "replicas": _REPLICAS}
    report.settings |= {"capacity_per_s": round(capacity_per_s, 1), "seconds": seconds, "rounds": rounds}
    starts = {
        _PULLING: sides.ours(options, _A_S, _C_S, replicas=_REPLICAS, batching__max_batch_size=_MAX_BATCH_SIZE),
        _ROUTED: sides.ray(options, "routing", _A_S, _C_S, replicas=_REPLICAS, max_batch_size=_MAX_BATCH_SIZE),
    }
    found: dict[str, dict[float, list[Any]]] = {name: {load: [] for load in _LOADS} for name in starts}

    def run(name: str) -> None:
        with starts[name]() as endpoint:
            for load in _LOADS:
                found[name][load].append(endpoint.load(OpenLoop(load * capacity_per_s), seconds, warm_up_s=3.0))

    answered: dict[int, list[Any]] = {1: [], _REPLICAS: []}

    def saturate(count: int) -> None:
        start = sides.ours(options, _A_S, _C_S, replicas=count, batching__max_batch_size=_MAX_BATCH_SIZE)
        with start() as endpoint:
            answered[count].append(endpoint.load(ClosedLoop(_CLIENTS), min(seconds, _FULL_SECONDS), warm_up_s=3.0))

    benchmark.alternate({name: partial(run, name) for name in starts}, rounds, benchmark.say)
    full = {f"replicas: {count}": partial(saturate, count) for count in answered}
    benchmark.alternate(full, min(rounds, _FULL_ROUNDS), benchmark.say)
    for load in _LOADS:
        for what, unit in (("mean", "mean latency"), ("p99", "p99")):
            values = {name: [_value_ms(one, what) for one in of[load]] for name, of in found.items()}
            for name in starts:
                report.add(f"{name}, {load:.0%} load: {unit}", "ms", values[name])
            title = f"{load:.0%} load: {unit} / Ray Serve's routing"
            report.goal(title, report.compare(title, values[_PULLING], values[_ROUTED]), _GOAL)
    per_s = {count: [run.summary()["answered_per_s"] for run in runs] for count, runs in answered.items()}
    for count, values in per_s.items():
        report.add(f"orchestray, replicas: {count}, {_CLIENTS} clients: answered", "/s", values)
    report.compare(f"answered by {_REPLICAS} replicas / by 1", per_s[_REPLICAS], per_s[1])
    sides.note_limits(report, {f"replicas: {count}, {_CLIENTS} clients": runs for count, runs in answered.items()})
    for name, of in found.items():
        sides.note_limits(report, {f"{name}, {load:.0%} load": runs for load, runs in of.items()})
    report.notes.append(
        "Both sides have an HTTP front of one process (FastAPI, uvicorn) and the same model and batcher; the peer's "
        "front asks a DeploymentHandle, which sends each request to a replica that batches what it got."
    )
    report.details = {
        name: {str(load): [one.summary() for one in runs] for load, runs in of.items()} for name, of in found.items()
    }
    report.details["saturated"] = {str(count): [one.summary() for one in runs] for count, runs in answered.items()}


def _value_ms(measured: Any, what: str) -> float:
    return sides.mean_ms(measured) if what == "mean" else float(measured.tally.latency.quantile_s(0.99) * 1e3)


if __name__ == "__main__":
    benchmark.run("serve_replicas", "Two replicas pulling from one queue, against Ray Serve's own routing.", measure)
