"""Mean latency at 267 requests/s with an asynchronous handler: `orchestray serve` beside stock `@serve.batch`."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_RATE_PER_S = 267.0
_SECONDS, _SECONDS_QUICK = 15.0, 2.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import OpenLoop

    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    rounds = options.rounds(5)
    report.settings = {"rate_per_s": _RATE_PER_S, "seconds": seconds, "rounds": rounds, "processes of the load": 1}
    report.settings |= {"a_s": sides.A_S, "c_s": sides.C_S, "max_batch_size": sides.MAX_BATCH_SIZE}
    found: dict[str, list[Any]] = {"orchestray": [], "Ray Serve": []}

    def run(name: str, start: sides.Side) -> None:
        with start() as endpoint:
            found[name].append(endpoint.load(OpenLoop(_RATE_PER_S), seconds))

    starts = {"orchestray": sides.ours(options), "Ray Serve": sides.ray(options, "batch")}
    benchmark.alternate({name: partial(run, name, start) for name, start in starts.items()}, rounds, benchmark.say)
    means = {name: [sides.mean_ms(one) for one in runs] for name, runs in found.items()}
    for name, runs in found.items():
        report.add(f"{name}: mean latency", "ms", means[name])
        report.add(f"{name}: p99", "ms", [one.tally.latency.quantile_s(0.99) * 1e3 for one in runs])
        report.add(f"{name}: answered", "1/s", [one.answered_per_s for one in runs])
    ratio = report.compare("mean latency / @serve.batch", means["orchestray"], means["Ray Serve"])
    report.goal("mean latency / @serve.batch", ratio, 1 / 20)
    sides.note_limits(report, found)
    report.notes.append(
        "Stock means `@serve.batch(max_batch_size=32)` with its default timeout of 10 ms, and a handler that awaits "
        "its model on a thread, behind Serve's default proxy. It does not keep up: its latency grows with the length "
        "of the measurement."
    )
    report.details = {name: [one.summary() for one in runs] for name, runs in found.items()}


if __name__ == "__main__":
    benchmark.run("serve_batch", "Mean latency at 267 requests/s, against stock @serve.batch of Ray Serve.", measure)
