"""The survey's systems of request batching: what each does, in virtual time against exact values."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.batching_simulation import Service, Trace, simulate
from lab.batching_theory import greedy_chain
from orchestray.loadtest.arrivals import poisson
from orchestray.platform.sim.event_loop import run
from orchestray.serving.batching import Adaptive, Batcher, BatchListener, Fixed, Greedy, Policy, Polled
from orchestray.serving.config.schema import BatchingSection
from orchestray.serving.replicas.batchers import make_batcher
from support.served import served_linear

ROOT = Path(__file__).parents[3]
A_S, C_S, MAX_BATCH_SIZE = 0.020, 0.0005, 32
SERVICE = Service(A_S, C_S)


MODELS = {"middling": SERVICE, "cheap, hardly faster in batches": Service(0.002, 0.002), "slow": Service(0.1, 0.001)}
"""Seconds of a batch of each model, which differ in what a batch saves."""


def under_poisson(policy: Policy, rate_per_s: float, num_requests: int = 600, service: Service = SERVICE) -> Trace:
    seconds = num_requests / rate_per_s
    return simulate(policy, service, lambda run: run.open_loop(poisson(rate_per_s, random.Random(1)), seconds))


def in_closed_loop(policy: Policy, service: Service, num_clients: int, seconds: float = 4.0) -> Trace:
    """Return what clients see that ask again a moment after each answer, so that they come back together."""
    rng = random.Random(1)
    delay = lambda: 0.0005 + rng.expovariate(2000.0)  # noqa: E731
    return simulate(policy, service, lambda run: run.closed_loop(num_clients, delay, seconds), warm_up_s=0.5)


Batches = list[tuple[float, list[int]]]
"""Times at which batches left, each with the requests in it."""


def squares(items: Sequence[int]) -> list[float]:
    return [item * item for item in items]


def batches_of(
    config: dict[str, Any],
    arrivals_s: Sequence[float],
    service_s: float = 0.001,
    compute: Callable[[Sequence[int]], list[float]] = squares,
) -> Batches:
    """Return the batches under a section `batching` of a config, for requests that arrive at these times.

    Each request must get the answer that it would have got alone.
    """
    left: Batches = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def model(items: Sequence[int]) -> list[float]:
            left.append((loop.time(), list(items)))
            await asyncio.sleep(service_s)
            return compute(items)

        batcher: Batcher[Any, Any] = make_batcher(BatchingSection(**config), BatchListener())
        batcher.add_runner(model)
        answers = []
        for number, arrival_s in enumerate(arrivals_s):
            await asyncio.sleep(arrival_s - loop.time())
            answers.append(batcher.put(number))
        alone = [compute([number])[0] for number in range(len(arrivals_s))]
        assert await asyncio.gather(*answers) == pytest.approx(alone, abs=1e-5)
        await batcher.close()

    run(main())
    return left


def arrivals_at(rate_per_s: float, num_requests: int, seed: int) -> list[float]:
    return [*itertools.accumulate(itertools.islice(poisson(rate_per_s, random.Random(seed)), num_requests))]


def polled_batches(
    max_batch_delay_ms: float, batch_size: int, arrivals_s: Sequence[float], service_s: float
) -> Batches:
    """Return the batches of `Model.pollBatch` of TorchServe's frontend with one worker, written down from it.

    It takes the first job of the queue however long that takes. Then it takes the next one, `batch_size` - 1 times,
    within what is left of the delay.
    """
    left: Batches = []

    async def worker(jobs: asyncio.Queue[int]) -> None:
        loop = asyncio.get_running_loop()
        while sum(len(batch) for _, batch in left) < len(arrivals_s):
            batch = [await jobs.get()]
            begin_s, max_delay_s = loop.time(), max_batch_delay_ms / 1e3
            for _ in range(batch_size - 1):
                try:
                    batch.append(await asyncio.wait_for(jobs.get(), max_delay_s))
                except TimeoutError:
                    break
                max_delay_s -= loop.time() - begin_s
                begin_s = loop.time()
                if max_delay_s <= 0:
                    break
            left.append((loop.time(), batch))
            await asyncio.sleep(service_s)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        jobs: asyncio.Queue[int] = asyncio.Queue()
        working = asyncio.create_task(worker(jobs))
        for number, arrival_s in enumerate(arrivals_s):
            await asyncio.sleep(arrival_s - loop.time())
            jobs.put_nowait(number)
        await working

    run(main())
    return left


def test_request_batching_with_a_timeout_leaves_when_full_or_at_the_timeout_even_if_it_is_one() -> None:
    config = {"policy": "fixed", "timeout_ms": 10, "max_batch_size": 3}
    left = batches_of(config, [0.001, 0.002, 0.004, 0.030, 0.050, 0.055])
    assert [items for _, items in left] == [[0, 1, 2], [3], [4, 5]]
    assert [when_s for when_s, _ in left] == pytest.approx([0.004, 0.040, 0.060], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate_per_s", [40, 250])
def test_no_request_waits_longer_than_the_timeout_and_a_batch_and_each_has_the_answer_of_a_model_alone(
    rate_per_s: float, seed: int
) -> None:
    """Serve a real model that is busy when requests come: batches of several, of one, and full ones are among them."""
    timeout_s, service_s, most = 0.010, 0.008, 6
    model, rng = served_linear(), np.random.default_rng(seed)
    samples = [model.signature.parse(rng.normal(size=4).astype(np.float32)) for _ in range(300)]

    def compute(items: Sequence[int]) -> list[float]:
        answers: list[Any] = model.run([samples[item] for item in items])
        return [float(np.float64(answer["outputs"]).sum()) for answer in answers]

    arrivals_s = arrivals_at(rate_per_s, len(samples), seed)
    config = {"policy": "fixed", "timeout_ms": 1e3 * timeout_s, "max_batch_size": most}
    left = batches_of(config, arrivals_s, service_s, compute)
    assert [item for _, items in left for item in items] == [*range(len(samples))]
    waited_s = [when_s - arrivals_s[item] for when_s, items in left for item in items]
    assert timeout_s - 1e-9 <= max(waited_s) <= timeout_s + service_s + 1e-9
    sizes = {len(items) for _, items in left}
    assert {1, 2} <= sizes <= {*range(1, most + 1)}


def test_batches_of_max_size_and_delay_as_in_tensorflow_serving() -> None:
    """Close a batch at its size or at its delay after its first request, and never larger, by the keys of our config.

    They are `max_batch_size` and `batch_timeout_micros` of TensorFlow Serving's batching parameters.
    """
    arrivals_s = arrivals_at(500.0, 200, 0)
    left = batches_of({"policy": "fixed", "timeout_ms": 5, "max_batch_size": 4}, arrivals_s)
    for when_s, items in left:
        assert len(items) <= 4
        assert len(items) == 4 or when_s >= arrivals_s[items[0]] + 0.005 - 1e-9
        assert when_s <= arrivals_s[items[0]] + 0.005 + 0.001 + 1e-9  # the delay, and a batch that ran
    assert {len(items) == 4 for _, items in left} == {True, False}  # both ends of a batch were there
    both_longer = {"policy": "fixed", "timeout_ms": 50, "max_batch_size": 16}
    assert max(len(items) for _, items in batches_of(both_longer, arrivals_s)) == 16


def test_torchserve_counts_its_delay_from_the_poll_so_that_old_requests_wait_it_again_and_fixed_from_the_arrival() -> (
    None
):
    """Send two requests while a batch of 20 ms runs: TorchServe's free worker makes them wait another 10 ms."""
    arrivals_s, service_s = [0.001, 0.015, 0.018], 0.020
    for leaves_s, left in (
        (0.041, polled_batches(10.0, 3, arrivals_s, service_s)),
        (0.041, batches_of({"policy": "polled", "timeout_ms": 10, "max_batch_size": 3}, arrivals_s, service_s)),
        (0.031, batches_of({"policy": "fixed", "timeout_ms": 10, "max_batch_size": 3}, arrivals_s, service_s)),
    ):
        assert [items for _, items in left] == [[0], [1, 2]]
        assert [when_s for when_s, _ in left] == pytest.approx([0.011, leaves_s], abs=1e-6)


@pytest.mark.parametrize("rate_per_s", [40, 250, 1000])
def test_the_policy_polled_makes_the_batches_that_torchserve_makes(rate_per_s: float) -> None:
    arrivals_s = arrivals_at(rate_per_s, 200, 2)
    peer = polled_batches(12.0, 8, arrivals_s, 0.009)
    ours = batches_of({"policy": "polled", "timeout_ms": 12, "max_batch_size": 8}, arrivals_s, 0.009)
    assert [items for _, items in ours] == [items for _, items in peer]
    assert [when_s for when_s, _ in ours] == pytest.approx([when_s for when_s, _ in peer], abs=1e-6)
    assert {len(items) for _, items in peer} != {1}


def test_torchserves_default_delay_more_than_doubles_the_latency_at_a_third_of_capacity() -> None:
    """Wait 100 ms at 267 requests a second, of 889 that batches of 32 could take."""
    assert under_poisson(Polled(100.0), 267).mean_s > 2 * under_poisson(Greedy(), 267).mean_s


@pytest.mark.parametrize(("model", "load"), [*zip(MODELS, (0.3, 0.03, 0.3), strict=True)])
def test_the_optimal_timeout_is_found_from_the_model_and_the_rate_and_is_none_for_independent_requests(
    model: str, load: float
) -> None:
    service = MODELS[model]
    rate_per_s = load * MAX_BATCH_SIZE / service.seconds(MAX_BATCH_SIZE)
    adaptive = under_poisson(Adaptive(), rate_per_s, 800, service)
    predicted_s = greedy_chain(rate_per_s, service.seconds(0), service.seconds(1) - service.seconds(0), MAX_BATCH_SIZE)
    assert adaptive.mean_s == pytest.approx(predicted_s[0], rel=0.07)
    swept_s = [under_poisson(Fixed(timeout_ms), rate_per_s, 800, service).mean_s for timeout_ms in (0, 2, 10, 50)]
    assert adaptive.mean_s <= 1.02 * min(swept_s)
    assert swept_s[0] <= 1.02 * min(swept_s)


@pytest.mark.parametrize("num_clients", [4, 12])
@pytest.mark.parametrize("model", ["middling", "slow"])
def test_the_optimal_timeout_of_clients_that_come_back_together_is_inside_the_sweep_and_is_found(
    model: str, num_clients: int
) -> None:
    service = MODELS[model]
    swept_s = [
        in_closed_loop(Fixed(timeout_ms), service, num_clients, 8.0).mean_s for timeout_ms in (0, 0.5, 2, 5, 20, 100)
    ]
    assert min(swept_s) < 0.9 * swept_s[0]
    assert min(swept_s) < 0.9 * swept_s[-1]
    assert in_closed_loop(Adaptive(), service, num_clients, 8.0).mean_s <= 1.05 * min(swept_s)


def test_the_optimum_that_theory_predicts_for_a_rate_was_measured_in_real_time() -> None:
    """Hold what the benchmark `batching_poisson` last measured against the exact chain of the same model."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "batching_poisson.json").read_text(encoding="utf-8"))
    medians = {each["name"]: each["median"] for each in measured["measurements"]}
    chosen = measured["settings"]
    rates = [int(name.partition("/s in real time, mean")[0]) for name in medians if "in real time, mean" in name]
    assert len(rates) >= 5
    assert max(rates) > 20 * min(rates)
    for rate_per_s in rates:
        predicted_s, _ = greedy_chain(rate_per_s, chosen["a_s"], chosen["c_s"], chosen["max_batch_size"])
        measured_s = 1e-3 * medians[f"{rate_per_s}/s in real time, mean latency"]
        assert measured_s == pytest.approx(predicted_s, rel=0.08)


def test_a_timeout_too_low_makes_small_batches_and_one_too_high_makes_early_requests_wait() -> None:
    """Check clients that come back together: the latency is a valley in the timeout, the batch size only grows."""
    low, middle, high = (in_closed_loop(Fixed(timeout_ms), SERVICE, 8) for timeout_ms in (0, 5, 50))
    assert middle.mean_s < low.mean_s
    assert middle.mean_s < high.mean_s
    sizes = [statistics.fmean(trace.batch_sizes) for trace in (low, middle, high)]
    assert sizes[0] < 0.7 * sizes[1]
    assert sizes[1] == pytest.approx(sizes[2], rel=0.05)


@pytest.mark.parametrize("rate_per_s", [5, 10, 20])
def test_with_a_longer_timeout_batches_grow_by_what_arrives_in_it(rate_per_s: float) -> None:
    """Use low rates: a batch is the request that opens it and those of its timeout, 1 + rate T."""
    for timeout_ms in (10.0, 50.0):
        sizes = under_poisson(Fixed(timeout_ms), rate_per_s, 800).batch_sizes
        service_s = SERVICE.seconds(1)
        least, most = 1 + rate_per_s * timeout_ms / 1e3, 1 + rate_per_s * (timeout_ms / 1e3 + service_s)
        assert 0.95 * least < statistics.fmean(sizes) < 1.05 * most


def test_greedy_never_leaves_a_free_runner_idle_while_a_request_waits() -> None:
    trace = under_poisson(Greedy(), 10)
    assert min(trace.latencies_s) == pytest.approx(SERVICE.seconds(1))
    assert trace.present_s == pytest.approx(sum(trace.latencies_s), rel=1e-9)
