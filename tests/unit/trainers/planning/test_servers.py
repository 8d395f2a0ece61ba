"""Workers and servers as a queue: exact where it is known, and as a simulation of the same queue has it."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from orchestray.trainers.planning.servers import ServerLoad, asynchronous, synchronous

LOAD = ServerLoad(num_workers=1, compute_s=1.0, transport_s=0.2, service_s=0.25, update_s=0.2, cpu_s=1.45, cores=64)


def test_a_worker_alone_takes_the_sum_of_its_parts() -> None:
    for step in (synchronous(LOAD), asynchronous(LOAD)):
        assert step.step_s == pytest.approx(1.0 + 0.2 + 0.25)
        assert step.queue_s == pytest.approx(0.0)
        assert step.staleness == 0.0


def test_workers_in_step_wait_for_the_slowest_and_for_the_gradients_of_all_and_for_one_update() -> None:
    step = synchronous(replace(LOAD, num_workers=8, chance_s=0.1))
    assert step.step_s == pytest.approx(1.0 + 0.1 + 0.2 + 8 * 0.05 + 0.2)


def test_a_full_server_serves_each_worker_once_a_round() -> None:
    step = asynchronous(replace(LOAD, num_workers=200))
    assert step.step_s == pytest.approx(200 * 0.25, rel=0.01)
    assert step.staleness == 199


def test_cores_that_all_share_bound_a_step() -> None:
    load = replace(LOAD, num_workers=4, cores=2)
    assert asynchronous(load).step_s == pytest.approx(4 * 1.45 / 2)
    assert synchronous(load).step_s == pytest.approx((4 * (1.45 - 0.2) + 0.2) / 2)  # one update


def test_a_bound_on_staleness_bounds_it() -> None:
    assert asynchronous(replace(LOAD, num_workers=10), bound=0).staleness == 0.0


def test_pushing_seldom_makes_gradients_less_stale() -> None:
    often, seldom = (asynchronous(replace(LOAD, num_workers=9), push_every=each) for each in (1, 4))
    assert (often.staleness, seldom.staleness) == (8.0, 2.0)


@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_the_throughput_is_that_of_a_simulated_queue(num_workers: int) -> None:
    load = replace(LOAD, num_workers=num_workers)
    assert asynchronous(load).step_s == pytest.approx(_simulated_s(num_workers, 1.2, 0.25), rel=0.02)


def _simulated_s(num_workers: int, think_s: float, service_s: float, rounds: int = 40_000) -> float:
    """Return the mean seconds of a round of a worker that thinks and is served, both for exponential times."""
    dice = random.Random(0)
    arrivals = [(dice.expovariate(1 / think_s), worker) for worker in range(num_workers)]
    heapq.heapify(arrivals)
    free_s = 0.0
    for _ in range(rounds):
        at_s, worker = heapq.heappop(arrivals)
        free_s = max(free_s, at_s) + dice.expovariate(1 / service_s)
        heapq.heappush(arrivals, (free_s + dice.expovariate(1 / think_s), worker))
    return free_s * num_workers / rounds
