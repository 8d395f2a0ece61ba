"""Mean latency under Poisson arrivals against the exact optimum; in virtual time, and once in real time in process."""

from __future__ import annotations

import asyncio
import random
import statistics

import harness

_A_S, _C_S, _MAX_BATCH_SIZE = 0.020, 0.0005, 32
_RATES_PER_S = (10, 30, 90, 267, 533)
_NUM_REQUESTS, _NUM_REQUESTS_QUICK = 4000, 400
_SEEDS = (1, 2, 3)
_REAL_RATE_PER_S = 90
_REAL_S, _REAL_QUICK_S = 20.0, 2.0
_RATIO, _OFFSET_MS = 1.03, 1.0


def measure(report: harness.Report, options: harness.Options) -> None:
    from orchestray.serving.batching.theory import greedy_chain

    num_requests = _NUM_REQUESTS_QUICK if options.quick else _NUM_REQUESTS
    report.settings = {
        "a_s": _A_S,
        "c_s": _C_S,
        "max_batch_size": _MAX_BATCH_SIZE,
        "requests a seed": num_requests,
        "seeds": _SEEDS,
    }
    rows = []
    for rate_per_s in _RATES_PER_S:
        harness.say(f"{rate_per_s} requests/s")
        exact_ms = greedy_chain(rate_per_s, _A_S, _C_S, _MAX_BATCH_SIZE)[0] * 1e3
        found_ms = [_virtual_ms(rate_per_s, num_requests, seed) for seed in _SEEDS]
        ours = report.add(f"{rate_per_s}/s, mean latency", "ms", found_ms)
        mean_ms = statistics.fmean(found_ms)
        report.goal(f"{rate_per_s}/s: mean latency", mean_ms, round(_RATIO * exact_ms + _OFFSET_MS, 2), "ms")
        rows.append([f"{rate_per_s}", f"{mean_ms:.2f}", f"{exact_ms:.2f}", f"{ours.median / exact_ms:.3f}"])
    report.table(["requests/s", "mean, ms", "exact optimum of greedy, ms", "ratio"], rows)
    harness.say("real time")
    seconds = _REAL_QUICK_S if options.quick else _REAL_S
    real_ms = [latency_s * 1e3 for latency_s in asyncio.run(_real(seconds))]
    exact_ms = greedy_chain(_REAL_RATE_PER_S, _A_S, _C_S, _MAX_BATCH_SIZE)[0] * 1e3
    report.add(f"{_REAL_RATE_PER_S}/s in real time, mean latency", "ms", [statistics.fmean(real_ms)])
    report.notes += [
        "The optimum is that of the exact Markov chain of the greedy policy; no policy is better by more than 0.6 %.",
        (
            f"In real time (an asyncio loop, the service a sleep, {seconds:g} s at {_REAL_RATE_PER_S}/s) the mean was "
            f"{statistics.fmean(real_ms):.1f} ms, the median {statistics.median(real_ms):.1f} ms, against "
            f"{exact_ms:.1f} ms: what the machine did beside it is in there."
        ),
    ]


def _virtual_ms(rate_per_s: float, num_requests: int, seed: int) -> float:
    from orchestray.serving.batching import Adaptive
    from orchestray.serving.batching.simulation import Service, poisson, simulate

    seconds = num_requests / rate_per_s
    trace = simulate(
        Adaptive(),
        Service(_A_S, _C_S),
        lambda run: run.open_loop(poisson(rate_per_s, random.Random(seed)), seconds),
        max_batch_size=_MAX_BATCH_SIZE,
    )
    return trace.mean_s * 1e3


async def _real(seconds: float) -> list[float]:
    """Latencies of the same on the loop of this process, in real time."""
    from orchestray.serving.batching import Batcher
    from orchestray.serving.batching.simulation import Service, Simulation, poisson

    batcher: Batcher[int, int] = Batcher(max_batch_size=_MAX_BATCH_SIZE)
    batcher.add_runner(Service(_A_S, _C_S))
    run = Simulation(batcher)
    await run.open_loop(poisson(_REAL_RATE_PER_S, random.Random(1)), asyncio.get_running_loop().time() + seconds)
    await batcher.close()
    return run.trace.latencies_s


if __name__ == "__main__":
    harness.run(
        "batching_poisson",
        "Mean latency under Poisson arrivals, service 20 ms + 0.5 ms b, at most 32 a batch.",
        measure,
    )
