"""Cost of an HTTP request beside the model: a JSON POST to a model that takes no time, at 32 and 1 connections."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_CONNECTIONS = (32, 1)
_SECONDS, _SECONDS_QUICK = 8.0, 1.0
_RAY, _OTHERS, _HAPROXY, _P50_MS, _P50_SEPARATE_MS = 1 / 6, 1 / 1.5, 1 / 1.2, 1.0, 2.0
_OURS, _SEPARATE = "orchestray", "orchestray, a separate replica"
_ONE_REPLICA = {"min": 1, "max": 1}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import ClosedLoop

    python = sides.peers_python(options)
    seconds = _SECONDS_QUICK if options.quick else _SECONDS
    rounds = options.rounds(5)
    report.settings = {"connections": _CONNECTIONS, "seconds": seconds, "rounds": rounds}
    report.settings |= sides.peer_versions(python)
    starts: dict[str, sides.Side] = {
        _OURS: sides.ours(options, 0.0, 0.0),
        _SEPARATE: sides.ours(options, 0.0, 0.0, replicas=_ONE_REPLICA),
        "Ray Serve": sides.ray(options, "plain", 0.0, 0.0),
        "Ray Serve, HAProxy": sides.ray(options, "plain", 0.0, 0.0, environment={"RAY_SERVE_ENABLE_HA_PROXY": "1"}),
        "BentoML": sides.bentoml(options, python, 0.0, 0.0, batched=False),
        "LitServe": sides.litserve(options, python, 0.0, 0.0, max_batch_size=1),
    }
    found: dict[str, dict[int, list[Any]]] = {name: {num: [] for num in _CONNECTIONS} for name in starts}

    def run(name: str) -> None:
        with starts[name]() as endpoint:
            for num in _CONNECTIONS:
                found[name][num].append(endpoint.load(ClosedLoop(num), seconds))

    benchmark.alternate({name: partial(run, name) for name in starts}, rounds, benchmark.say)
    rows = []
    for name, of in found.items():
        per_s = report.add(f"{name}, 32 connections: answered", "1/s", [one.answered_per_s for one in of[32]])
        p50 = report.add(f"{name}, 1 connection: p50", "ms", [one.tally.latency.quantile_s(0.5) * 1e3 for one in of[1]])
        rows.append([name, f"{per_s.median:.0f}", f"{p50.median:.2f}"])
        sides.note_limits(report, {f"{name}, {num} connections": runs for num, runs in of.items()})
    report.table(["server", "32 connections: requests/s", "1 connection: p50, ms"], rows)
    time_s = {name: [1 / one.answered_per_s for one in of[32]] for name, of in found.items()}
    for peer, limit in (
        ("Ray Serve", _RAY),
        ("Ray Serve, HAProxy", _HAPROXY),
        ("BentoML", _OTHERS),
        ("LitServe", _OTHERS),
    ):
        name = f"32 connections: time a request / {peer}"
        report.goal(name, report.compare(name, time_s[_OURS], time_s[peer]), limit)
    for name, limit_ms in ((_OURS, _P50_MS), (_SEPARATE, _P50_SEPARATE_MS)):
        p50_ms = statistics.median(one.tally.latency.quantile_s(0.5) * 1e3 for one in found[name][1])
        report.goal(f"{name}, 1 connection: p50", p50_ms, limit_ms, "ms")
    report.notes.append(
        "Closed loops; the load generator runs on the same cores. Ray Serve is its default proxy and a plain "
        "deployment; BentoML and LitServe have one worker and no batching; ours is as `orchestray serve` starts it."
    )
    report.details = {
        name: {str(num): [one.summary() for one in runs] for num, runs in of.items()} for name, of in found.items()
    }


if __name__ == "__main__":
    benchmark.run(
        "serve_noop",
        "A JSON POST to a model that takes no time, against Ray Serve, BentoML and LitServe.",
        measure,
        sides.add_options,
    )
