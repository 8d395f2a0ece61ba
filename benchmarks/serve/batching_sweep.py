"""The adaptive wait against the best fixed timeout of each workload, found by grid search; in virtual time."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections import defaultdict
from typing import Any

from harness import benchmark, machine
from serve import batching_workloads as workloads

_NUM_REQUESTS, _NUM_REQUESTS_QUICK = 1500, 200
_SEEDS, _SEEDS_QUICK = (1, 2, 3, 4, 5), (1,)
_MEAN, _WORST, _TAIL = 1.00, 1.05, 1.05
_SIDES = ("adaptive", "greedy", *workloads.TIMEOUTS_MS)


def measure_one(job: tuple[str, str, Any, int, int]) -> tuple[str, str, Any, float, float, float]:
    """Return mean and 99th percentile of latency in ms, and mean batch size: one policy, one workload, one seed."""
    from orchestray.serving.batching.policies import Adaptive, Fixed, Greedy

    service, name, side, num_requests, seed = job
    policy = Adaptive() if side == "adaptive" else Greedy() if side == "greedy" else Fixed(side)
    times = workloads.SERVICES[service]
    workload = next(one for one in workloads.workloads(*times, num_requests) if one.name == name)
    trace = workloads.measure(policy, times, workload, seed)
    batch = sum(trace.batch_sizes) / len(trace.batch_sizes)
    return service, name, side, trace.mean_s * 1e3, trace.quantile_s(0.99) * 1e3, batch


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    num_requests = _NUM_REQUESTS_QUICK if options.quick else _NUM_REQUESTS
    seeds = _SEEDS_QUICK if options.quick else _SEEDS
    jobs = [
        (service, workload.name, side, num_requests, seed)
        for service, times in workloads.SERVICES.items()
        for workload in workloads.workloads(*times, num_requests)
        for side in _SIDES
        for seed in seeds
    ]
    with multiprocessing.Pool(machine.usable_cores()) as pool:
        measured = pool.map(measure_one, jobs, chunksize=1)
    report.settings = {
        "requests a workload, about": num_requests,
        "max_batch_size": workloads.MAX_BATCH_SIZE,
        "timeouts_ms": workloads.TIMEOUTS_MS,
        "seeds": seeds,
    }
    by_seed: dict[tuple[str, str], dict[Any, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for service, name, side, *numbers in measured:
        by_seed[service, name][side].append(numbers)
    found: dict[tuple[str, str], dict[Any, tuple[float, float, float]]] = {
        workload: {side: _means(each) for side, each in sides.items()} for workload, sides in by_seed.items()
    }
    _judge(report, found)


def _means(seeds: list[list[float]]) -> tuple[float, float, float]:
    mean_ms, p99_ms, batch = (statistics.fmean(numbers) for numbers in zip(*seeds, strict=True))
    return mean_ms, p99_ms, batch


def _judge(report: benchmark.Report, found: dict[tuple[str, str], dict[Any, tuple[float, float, float]]]) -> None:
    rows, means, tails, hard_tails, greedy = [], [], [], [], []
    for (service, name), sides in found.items():
        best = min(workloads.TIMEOUTS_MS, key=lambda timeout_ms: sides[timeout_ms][0])
        ours, peer = sides["adaptive"], sides[best]
        means.append(ours[0] / peer[0])
        greedy.append(sides["greedy"][0] / peer[0])
        tails.append(ours[1] / peer[1])
        hard_tails.append(ours[1] / min(sides[timeout_ms][1] for timeout_ms in workloads.TIMEOUTS_MS))
        rows.append([service, name, f"{ours[0]:.2f}", f"{peer[0]:.2f} ({best} ms)", f"{means[-1]:.3f}"])
        rows[-1] += [f"{ours[1]:.1f}", f"{peer[1]:.1f}", f"{tails[-1]:.3f}", f"{ours[2]:.1f}"]
    report.table(
        ["service", "workload", "mean, ms", "of the best timeout", "ratio", "p99, ms", "of that", "ratio", "batch"],
        rows,
    )
    report.compare("mean latency against the best timeout of each workload", means, [1.0] * len(means))
    report.compare("p99 against that of the same timeout", tails, [1.0] * len(tails))
    report.goal("mean: geometric mean of the ratios to the best timeout of each workload", _geometric(means), _MEAN)
    report.goal("mean: worst ratio", max(means), _WORST)
    report.goal("p99: geometric mean of the ratios to the timeout with the best mean", _geometric(tails), _TAIL)
    report.goal("p99: geometric mean of the ratios to the timeout with the best p99", _geometric(hard_tails), _TAIL)
    one = {
        t: _geometric([s[t][0] / min(s[u][0] for u in workloads.TIMEOUTS_MS) for s in found.values()])
        for t in workloads.TIMEOUTS_MS
    }
    timeout_ms = min(one, key=lambda t: one[t])
    report.notes += [
        (
            "In virtual time: the same numbers on every machine. A workload has the same arrivals for every policy; "
            "its numbers are means over the seeds."
        ),
        (
            f"Geometric mean of the means against the best timeout of each workload: adaptive {_geometric(means):.3f}, "
            f"greedy {_geometric(greedy):.3f}, the best single timeout ({timeout_ms} ms) {one[timeout_ms]:.3f}."
        ),
        f"The worst single ratio of p99 is {max(tails):.2f}.",
    ]


def _geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    benchmark.run(
        "batching_sweep",
        "The adaptive wait against the best fixed timeout of each workload, found by grid search.",
        measure,
    )
