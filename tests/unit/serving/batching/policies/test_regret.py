"""Regret of the adaptive wait after a change of arrivals, in virtual time.

The regret is the latency of the next requests, summed, above that of a policy that starts with them. Waits for clients
that are gone cost three batch overheads before all is forgotten, plus the wait under way. That wait is one overhead at
most for each request that waits. What is forgotten is learned again as at the start.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from lab.batching_simulation import Service
from orchestray.loadtest.arrivals import poisson
from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Adaptive, Batcher

OVERHEAD_S = 0.020
SERVICE = Service(OVERHEAD_S, 0.0005)
MOST_LOST = 4.0
"""Bound of the regret, in overheads: three, and the wait under way with what a new policy learns otherwise."""

Load = Callable[[Batcher[int, int], random.Random], Awaitable[list[float]]]


def clients(num: int, think_s: float, num_requests: int) -> Load:
    """Return a closed loop of clients that send their next request `think_s` after an answer, on average."""

    async def drive(batcher: Batcher[int, int], rng: random.Random) -> list[float]:
        latencies_s: list[float] = []

        async def client() -> None:
            while len(latencies_s) < num_requests:
                await asyncio.sleep(0.0005 + rng.expovariate(1 / think_s))
                began_s = asyncio.get_running_loop().time()
                await batcher.put(0)
                latencies_s.append(asyncio.get_running_loop().time() - began_s)

        await asyncio.gather(*(client() for _ in range(num)))
        return latencies_s

    return drive


def independent(rate_per_s: float, num_requests: int) -> Load:
    async def drive(batcher: Batcher[int, int], rng: random.Random) -> list[float]:
        arrivals, answers = poisson(rate_per_s, rng), []
        for _ in range(num_requests):
            await asyncio.sleep(next(arrivals))
            answers.append(batcher.put(0))
        await asyncio.gather(*answers)
        return []

    return drive


async def aborts(batcher: Batcher[int, int], rng: random.Random) -> list[float]:
    """Send 2,000 requests, a hundred at a time, whose clients are gone before most are run."""
    for _ in range(20):
        answers = [batcher.put(0) for _ in range(100)]
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        for answer in answers:
            answer.cancel()
    return []


BEFORE: dict[str, Load] = {
    "a mass of aborts": aborts,
    "a crowd that returns at once": clients(32, 0.0005, 1000),
    "a crowd that thinks": clients(16, 0.020, 1000),
    "a high rate": independent(500.0, 1500),
    "a low rate": independent(20.0, 200),
}


def sum_s(after: Load, seed: int, before: Load | None = None) -> float:
    """Return the summed latency of a load, for a new policy or one that another load came to before."""

    async def main() -> float:
        batcher: Batcher[int, int] = Batcher(policy=Adaptive(), max_batch_size=32)
        batcher.add_runner(SERVICE)
        if before is not None:
            await before(batcher, random.Random(f"{seed} before"))
            await asyncio.sleep(1.0)
        latencies_s = await after(batcher, random.Random(f"{seed} after"))
        await batcher.close()
        return sum(latencies_s)

    return event_loop.run(main())


@pytest.mark.parametrize("think_s", [0.0005, 0.005, 0.1])
@pytest.mark.parametrize("before", BEFORE)
def test_whoever_was_there_before_one_client_alone_waits_for_a_few_batch_overheads_in_all(
    before: str, think_s: float
) -> None:
    for seed in range(3):
        lone = clients(1, think_s, 150)
        regret_s = sum_s(lone, seed, BEFORE[before]) - sum_s(lone, seed)
        assert regret_s <= MOST_LOST * OVERHEAD_S, f"seed {seed}: {regret_s / OVERHEAD_S:.1f} overheads"
