"""Mean latency of one model against the rate of requests, in four servers; it draws docs/pictures/serving.svg.

At one rate ours is held against stock `@serve.batch`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_RATES_PER_S = (10.0, 30.0, 90.0, 150.0, 267.0, 533.0)
_RATES_QUICK_PER_S = (30.0, 267.0)
_HELD_PER_S, _GOAL = 267.0, 1 / 20
_SECONDS, _SECONDS_QUICK = 8.0, 1.0
_WARM_UP_S = 2.0
_OURS, _PEER = "orchestray", "Ray Serve"
_LOST_MS = 3000.0
"""Above it a server does not keep up: higher rates would only take longer."""
_PICTURE = benchmark.REPOSITORY / "docs" / "pictures" / "serving.svg"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import OpenLoop

    python = sides.peers_python(options)
    rates_per_s = _RATES_QUICK_PER_S if options.quick else _RATES_PER_S
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    rounds = options.rounds(3)
    report.settings = {"rates_per_s": rates_per_s, "seconds": seconds, "rounds": rounds}
    report.settings |= {"a_s": sides.A_S, "c_s": sides.C_S, "max_batch_size": sides.MAX_BATCH_SIZE}
    report.settings |= sides.peer_versions(python)
    starts: dict[str, sides.Side] = {
        _OURS: sides.ours(options),
        _PEER: sides.ray(options, "batch"),
        "BentoML": sides.bentoml(options, python),
        "LitServe": sides.litserve(options, python, batch_timeout_s=0.0),
    }
    found: dict[str, dict[float, list[Any]]] = {name: {} for name in starts}

    def run(name: str) -> None:
        with starts[name]() as endpoint:
            for rate_per_s in rates_per_s:
                measured = endpoint.load(OpenLoop(rate_per_s), seconds, warm_up_s=_WARM_UP_S)
                found[name].setdefault(rate_per_s, []).append(measured)
                if sides.mean_ms(measured) > _LOST_MS:
                    break

    benchmark.alternate({name: partial(run, name) for name in starts}, rounds, benchmark.say)
    medians = _tell(report, found)
    title = f"{_HELD_PER_S:g}/s: mean latency / @serve.batch"
    ours_ms, peer_ms = ([sides.mean_ms(one) for one in found[name][_HELD_PER_S]] for name in (_OURS, _PEER))
    report.goal(title, report.compare(title, ours_ms, peer_ms), _GOAL)
    if not options.quick:
        _draw(medians, _PICTURE)
    report.notes.append(
        f"A server whose mean passed {_LOST_MS:g} ms was not asked for more. Ray Serve is `@serve.batch` with its "
        "default timeout of 10 ms and an asynchronous handler, behind Serve's default proxy; where it does not keep up "
        "its latency grows with the length of the measurement. LitServe has a timeout of 0, BentoML its adaptive "
        "batching."
    )
    report.details = {
        name: {f"{rate:g}": [one.summary() for one in runs] for rate, runs in of.items()} for name, of in found.items()
    }


def _tell(report: benchmark.Report, found: dict[str, dict[float, list[Any]]]) -> dict[str, list[tuple[float, float]]]:
    """Add all numbers; returns the median of the mean latencies, ms, by rate."""
    rows, medians = [], {}
    for name, of in found.items():
        medians[name] = []
        for rate_per_s, runs in of.items():
            mean = report.add(f"{name}, {rate_per_s:g}/s: mean", "ms", [sides.mean_ms(one) for one in runs])
            p99_ms = [one.tally.latency.quantile_s(0.99) * 1e3 for one in runs]
            p99 = report.add(f"{name}, {rate_per_s:g}/s: p99", "ms", p99_ms)
            rows.append([name, f"{rate_per_s:g}", f"{mean.median:.1f}", f"{p99.median:.1f}"])
            medians[name].append((rate_per_s, mean.median))
        sides.note_limits(report, {f"{name}, {rate:g}/s": runs for rate, runs in of.items()})
    report.table(["server", "requests/s", "mean, ms", "p99, ms"], rows)
    return medians


def _draw(medians: dict[str, list[tuple[float, float]]], picture: Path) -> None:
    from orchestray.loadtest.picture import svg

    title = "Mean latency of a model of 20 ms + 0.5 ms a sample"
    text = svg(medians, title=title, x_label="requests/s, Poisson", y_label="mean latency, ms")
    picture.write_text(text, encoding="utf-8")
    benchmark.say(f"drawn: {picture.relative_to(benchmark.REPOSITORY)}")


if __name__ == "__main__":
    benchmark.run(
        "serve_rates",
        "Mean latency against rate: orchestray serve, Ray Serve, BentoML and LitServe with one model.",
        measure,
        sides.add_options,
    )
