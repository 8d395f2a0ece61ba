"""The batcher in virtual time against what is known exactly (Poisson arrivals, one server, s(b) = a + c b)."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Coroutine
from typing import Any

import pytest

from lab.batching_simulation import Service, Simulation, Trace, simulate
from lab.batching_theory import greedy_chain, mean_latency_s, mean_square_batch
from orchestray.loadtest.arrivals import poisson
from orchestray.serving.batching.policies import Adaptive, Greedy, Policy

A_S, C_S = 0.020, 0.0005
SERVICE = Service(A_S, C_S)


def measure(policy: Policy, rate_per_s: float, num_requests: int, seed: int, max_batch_size: int = 32) -> Trace:
    seconds = num_requests / rate_per_s

    def drive(run: Simulation) -> Coroutine[Any, Any, None]:
        return run.open_loop(poisson(rate_per_s, random.Random(seed)), seconds)

    return simulate(policy, SERVICE, drive, max_batch_size=max_batch_size)


@pytest.mark.parametrize(
    ("rate_per_s", "latency_ms", "batch"),
    [(10, 22.58, 1.020), (30, 26.16, 1.157), (90, 31.12, 2.043), (267, 35.16, 6.165), (533, 41.51, 14.53)],
)
def test_the_exact_chain_gives_the_table_of_known_values(rate_per_s: float, latency_ms: float, batch: float) -> None:
    latency_s, mean_batch = greedy_chain(rate_per_s, A_S, C_S, 32)
    assert latency_s * 1e3 == pytest.approx(latency_ms, abs=0.01)
    assert mean_batch == pytest.approx(batch, rel=1e-3)


def test_the_exact_chain_has_no_answer_at_capacity() -> None:
    with pytest.raises(ValueError, match="at or above capacity"):
        greedy_chain(32 / 0.036, A_S, C_S, 32)


@pytest.mark.parametrize("rate_per_s", [10, 90, 267])
def test_mean_latency_and_mean_batch_size_obey_the_exact_identity(rate_per_s: float) -> None:
    """Allow for sampling noise: the identity holds for the stationary law, and 3,000 requests are a sample."""
    traces = [measure(Greedy(), rate_per_s, 1500, seed, max_batch_size=2000) for seed in (1, 2)]
    sizes = [size for trace in traces for size in trace.batch_sizes]
    latency_s = statistics.fmean(latency for trace in traces for latency in trace.latencies_s)
    mean = statistics.fmean(sizes)
    square = statistics.fmean(size * size for size in sizes)
    of_mean_alone_s = mean_latency_s(rate_per_s, A_S, C_S, mean, mean_square_batch(rate_per_s, A_S, C_S, mean))
    assert latency_s == pytest.approx(of_mean_alone_s, rel=0.03)
    assert latency_s == pytest.approx(mean_latency_s(rate_per_s, A_S, C_S, mean, square), rel=0.03)
    assert square == pytest.approx(mean_square_batch(rate_per_s, A_S, C_S, mean), rel=0.08)


@pytest.mark.parametrize("make", [Greedy, Adaptive])
@pytest.mark.parametrize("rate_per_s", [30, 267])
def test_mean_latency_is_the_exact_optimum_of_memoryless_arrivals(make: type[Policy], rate_per_s: float) -> None:
    traces = [measure(make(), rate_per_s, 1000, seed) for seed in (1, 2, 3)]
    latency_s = statistics.fmean(trace.mean_s for trace in traces)
    assert latency_s == pytest.approx(greedy_chain(rate_per_s, A_S, C_S, 32)[0], rel=0.03)


@pytest.mark.parametrize("num_clients", [1, 4, 40])
def test_closed_loops_obey_littles_law_and_the_interactive_law_exactly(num_clients: int) -> None:
    """Check N = X (W + Z) over a whole run: clients are either present or on their way, all the time.

    The batcher is asked how many are present often enough that the sum of its answers is the integral.
    """
    delay_s, every_s = 0.002, 0.000_37
    seen: list[int] = []

    async def watch(run: Simulation) -> None:
        while True:
            stats = run.batcher.stats
            seen.append(stats.num_queued + stats.num_in_flight)
            await asyncio.sleep(every_s)

    async def drive(run: Simulation) -> None:
        watching.append(asyncio.ensure_future(watch(run)))
        await run.closed_loop(num_clients, lambda: delay_s, 4.0)

    watching: list[asyncio.Future[None]] = []
    trace = simulate(Adaptive(), SERVICE, drive)
    assert sum(seen) * every_s == pytest.approx(sum(trace.latencies_s), rel=0.01)
    assert max(seen) <= num_clients
    on_the_way_s = delay_s * (len(trace.latencies_s))
    assert trace.present_s + on_the_way_s == pytest.approx(num_clients * 4.0, rel=0.02)


def test_requests_that_are_late_are_in_the_batcher_until_their_batch_ends() -> None:
    """Take the first requests, since the model knows nothing yet, and answer them while their batch still runs."""

    async def drive(run: Simulation) -> None:
        for _ in range(3):
            run.offer()

    trace = simulate(Greedy(), Service(0.1, 0.0), drive, allow_s=0.04)
    assert trace.num_late == 3
    assert trace.in_system_s == pytest.approx(3 * 0.1)


def test_a_run_whose_batcher_has_other_requests_than_were_offered_breaks_littles_law() -> None:
    async def drive(run: Simulation) -> None:
        run.offer()
        run.batcher.put(-1)  # behind the simulation's back: as one that the batcher forgets, or counts twice

    with pytest.raises(AssertionError, match=r"Little's law: the batcher had 0\.2\d* requests"):
        simulate(Greedy(), Service(0.1, 0.0), drive)


def test_a_run_in_virtual_time_is_the_same_every_time() -> None:
    first, second = (measure(Adaptive(), 200, 500, 7).latencies_s for _ in range(2))
    assert first == second


def test_virtual_time_jumps_and_notices_that_everything_waits() -> None:
    from orchestray.platform.sim import event_loop

    async def sleep_a_day() -> float:
        await asyncio.sleep(86_400.0)
        return asyncio.get_running_loop().time()

    assert event_loop.run(sleep_a_day()) == pytest.approx(86_400.0)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(event_loop.DeadlockError):
        event_loop.run(forever())
