"""The survey's systems of request batching: what each does, in virtual time against exact values."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence

import pytest

from orchestray.serving.batching import Adaptive, Batcher, Fixed, Greedy, Policy
from orchestray.serving.batching.simulation import Service, Trace, poisson, simulate
from orchestray.serving.batching.theory import greedy_chain
from orchestray.serving.batching.virtual_time import run

A_S, C_S, MAX_BATCH_SIZE = 0.020, 0.0005, 32
SERVICE = Service(A_S, C_S)


def under_poisson(policy: Policy, rate_per_s: float, num_requests: int = 600) -> Trace:
    seconds = num_requests / rate_per_s
    return simulate(policy, SERVICE, lambda run: run.open_loop(poisson(rate_per_s, random.Random(1)), seconds))


def batches_of(timeout_ms: float, max_batch_size: int, arrivals_s: Sequence[float]) -> list[tuple[float, list[int]]]:
    """When each batch leaves and what is in it, for requests that arrive at these times."""
    left: list[tuple[float, list[int]]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def model(items: Sequence[int]) -> list[int]:
            left.append((loop.time(), list(items)))
            await asyncio.sleep(0.001)
            return [item * item for item in items]

        batcher: Batcher[int, int] = Batcher(policy=Fixed(timeout_ms), max_batch_size=max_batch_size)
        batcher.add_runner(model)
        answers = []
        for number, arrival_s in enumerate(arrivals_s):
            await asyncio.sleep(arrival_s - loop.time())
            answers.append(batcher.put(number))
        assert await asyncio.gather(*answers) == [number * number for number in range(len(arrivals_s))]
        await batcher.close()

    run(main())
    return left


def test_request_batching_with_a_timeout_leaves_when_full_or_at_the_timeout_even_if_it_is_one() -> None:
    left = batches_of(10.0, 3, [0.001, 0.002, 0.004, 0.030, 0.050, 0.055])
    assert [items for _, items in left] == [[0, 1, 2], [3], [4, 5]]
    assert [when_s for when_s, _ in left] == pytest.approx([0.004, 0.040, 0.060], abs=1e-6)


def test_batches_of_max_size_and_delay_as_in_tensorflow_serving_and_torchserve() -> None:
    """A batch is closed at its size or its delay after its first request, and never larger."""
    rng = random.Random(0)
    arrivals_s, now_s = [], 0.0
    for _ in range(200):
        now_s += rng.expovariate(500.0)
        arrivals_s.append(now_s)
    left = batches_of(5.0, 4, arrivals_s)
    for when_s, items in left:
        assert len(items) <= 4
        assert len(items) == 4 or when_s >= arrivals_s[items[0]] + 0.005 - 1e-9
        assert when_s <= arrivals_s[items[0]] + 0.005 + 0.001 + 1e-9  # the delay, and a batch that ran


@pytest.mark.parametrize("rate_per_s", [30, 267])
def test_the_optimal_timeout_is_found_from_the_model_and_the_rate_and_is_none_for_independent_requests(
    rate_per_s: float,
) -> None:
    adaptive = under_poisson(Adaptive(), rate_per_s, 800)
    assert adaptive.mean_s == pytest.approx(greedy_chain(rate_per_s, A_S, C_S, MAX_BATCH_SIZE)[0], rel=0.07)
    fixed_s = [under_poisson(Fixed(timeout_ms), rate_per_s, 800).mean_s for timeout_ms in (0, 10, 50)]
    assert adaptive.mean_s <= 1.02 * min(fixed_s)


def test_a_timeout_too_low_makes_small_batches_and_one_too_high_makes_early_requests_wait() -> None:
    """Clients that come back together: the mean latency is a valley in the timeout, the batch size only grows."""

    def closed(timeout_ms: float) -> Trace:
        rng = random.Random(1)
        delay = lambda: 0.0005 + rng.expovariate(2000.0)  # noqa: E731
        return simulate(Fixed(timeout_ms), SERVICE, lambda run: run.closed_loop(8, delay, 4.0), warm_up_s=0.5)

    low, middle, high = (closed(timeout_ms) for timeout_ms in (0, 5, 50))
    assert middle.mean_s < low.mean_s
    assert middle.mean_s < high.mean_s
    sizes = [statistics.fmean(trace.batch_sizes) for trace in (low, middle, high)]
    assert sizes[0] < 0.7 * sizes[1]
    assert sizes[1] == pytest.approx(sizes[2], rel=0.05)


def test_with_a_longer_timeout_batches_grow_by_what_arrives_in_it() -> None:
    """At a low rate, a batch is the request that opens it and those of its timeout: 1 + rate T."""
    for timeout_ms in (10.0, 50.0):
        sizes = under_poisson(Fixed(timeout_ms), 10, 800).batch_sizes
        service_s = SERVICE.seconds(1)
        least, most = 1 + 10 * timeout_ms / 1e3, 1 + 10 * (timeout_ms / 1e3 + service_s)
        assert 0.95 * least < statistics.fmean(sizes) < 1.05 * most


def test_greedy_never_leaves_a_free_runner_idle_while_a_request_waits() -> None:
    trace = under_poisson(Greedy(), 10)
    assert min(trace.latencies_s) == pytest.approx(SERVICE.seconds(1))
    assert trace.present_s == pytest.approx(sum(trace.latencies_s), rel=1e-9)
