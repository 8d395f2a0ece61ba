"""Replicas that follow the load against a fixed pool, on a recorded trace: cost and p95; and cold starts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_A_S, _C_S, _MAX_BATCH_SIZE = 0.020, 0.0005, 32
_RISING = tuple(round(20.0 * 75.0 ** (step / 13)) for step in range(14))
_RATES_PER_S = (*_RISING, *reversed(_RISING))
"""A day in small: what is asked rises from 20 to 1,500 a second, by two fifths at each step, and falls again."""
_EACH_S, _EACH_QUICK_S = 20.0, 5.0
_TARGET_S = 0.060
_MOST = 4
_START_S = 5.0
"""Time that a replica of the rehearsal takes to start: as measured of one on Ray Serve, a loaded machine included."""
_SEEDS = 5
_COLD_ROUNDS = 5
_ZERO_S, _LOOK_S = 180.0, 0.2
"""For the last replica to go when nobody asks, at most; it is given up after 30 s."""
_REPLICA_SECONDS, _P95 = 0.40, 1.35


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from lab.batching_simulation import Service
    from lab.rehearsal import rehearse
    from orchestray.serving.replicas.scaling import ScalingGoal

    each_s = _EACH_QUICK_S if options.quick else _EACH_S
    seconds, service = each_s * len(_RATES_PER_S), Service(_A_S, _C_S)
    goal = ScalingGoal(least=1, most=_MOST, target_latency_s=_TARGET_S)
    report.settings = {"a_s": _A_S, "c_s": _C_S, "max_batch_size": _MAX_BATCH_SIZE, "rates_per_s": _RATES_PER_S}
    report.settings |= {"each_s": each_s, "target_s": _TARGET_S, "max": _MOST, "start_s": _START_S}
    pools: dict[str, Any] = {"follows the load": {"goal": goal, "num_replicas": 1}}
    pools |= {f"{count} fixed": {"num_replicas": count} for count in (_MOST, _MOST - 1, _MOST - 2)}
    cost: dict[str, list[float]] = {name: [] for name in pools}
    p95: dict[str, list[float]] = {name: [] for name in pools}
    for seed in range(1 if options.quick else _SEEDS):
        trace = record(each_s, random.Random(seed))
        for name, pool in pools.items():
            benchmark.say(f"trace {seed + 1}: {name}")
            found = rehearse(replay(trace), seconds, service, max_batch_size=_MAX_BATCH_SIZE, start_s=_START_S, **pool)
            cost[name].append(found.replica_s)
            p95[name].append(found.trace.quantile_s(0.95) * 1e3)
    for name in pools:
        report.add(f"{name}: replica-seconds", "s", cost[name])
        report.add(f"{name}: p95", "ms", p95[name])
    ours, most = "follows the load", f"{_MOST} fixed"
    report.goal(
        f"replica-seconds, of those of {most}",
        statistics.median(benchmark.ratios(cost[ours], cost[most])),
        _REPLICA_SECONDS,
    )
    report.goal("p95, of that of " + most, statistics.median(benchmark.ratios(p95[ours], p95[most])), _P95)
    report.table(
        ["replicas", "replica-seconds", "p95, ms"],
        [[name, f"{statistics.median(cost[name]):.0f}", f"{statistics.median(p95[name]):.1f}"] for name in pools],
    )
    rounds = options.rounds(_COLD_ROUNDS)
    start = sides.ours(options, _A_S, _C_S)
    report.add("from the command to the first answer", "s", [cold_start_s(start) for _ in range(rounds)])
    with sides.ours(options, _A_S, _C_S, replicas={"min": 0, "max": 1})() as endpoint:
        from_zero = report.add(
            "from a request at zero replicas to its answer", "s", [from_zero_s(endpoint) for _ in range(rounds)]
        )
    report.notes.append(
        "Virtual time: the batcher, the meter of the load and the policy are those that serve; the model and the "
        f"clock are not real, and a replica takes {_START_S:g} s to start. Cold starts are real: `orchestray serve` of "
        "a run, imports and warm-up included; and, of `replicas: {min: 0, max: 1}`, a request that came when the last "
        f"replica had gone, and was answered after {from_zero.median:.1f} s."
    )


def record(each_s: float, rng: random.Random) -> list[float]:
    """Return the moments of the trace's requests, in seconds from its start."""
    moments, begin_s = [], 0.0
    for rate_per_s in _RATES_PER_S:
        now_s = begin_s + rng.expovariate(rate_per_s)
        while now_s < begin_s + each_s:
            moments.append(now_s)
            now_s += rng.expovariate(rate_per_s)
        begin_s += each_s
    return moments


def replay(moments: list[float]) -> Iterator[float]:
    """Yield the gaps between the recorded requests."""
    before_s = 0.0
    for moment_s in moments:
        yield moment_s - before_s
        before_s = moment_s


def cold_start_s(start: sides.Side) -> float:
    """Return the seconds from the command to the first answer."""
    began_s = time.perf_counter()
    with start():
        return time.perf_counter() - began_s


def from_zero_s(endpoint: sides.Endpoint) -> float:
    """Return the seconds from a request to its answer, where there is no replica: when the last one has gone."""
    benchmark.say("until the last replica goes")
    deadline_s = time.monotonic() + _ZERO_S
    while num_replicas(endpoint) != 0:
        endpoint.running.check_alive()
        if time.monotonic() > deadline_s:
            raise benchmark.BenchmarkError(f"the last replica has not gone within {_ZERO_S:g} s of silence")
        time.sleep(_LOOK_S)
    began_s = time.perf_counter()
    if not sides.ask(endpoint):
        raise benchmark.BenchmarkError("a request at zero replicas was refused")
    return time.perf_counter() - began_s


def num_replicas(endpoint: sides.Endpoint) -> int:
    """Return how many replicas take batches now, as the endpoint says."""
    from orchestray.loadtest.exchange import exchange

    lines = exchange(endpoint.target(), timeout_s=_ZERO_S, path="/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("orchestray_replicas{")]
    if not found:
        raise benchmark.BenchmarkError("the endpoint's /metrics say nothing of replicas")
    return sum(int(float(line.rpartition(" ")[2])) for line in found)


if __name__ == "__main__":
    benchmark.run("serve_scaling", "Replicas that follow the load against a fixed pool, on a recorded trace.", measure)
