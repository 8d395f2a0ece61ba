"""Group D: workers of unlike speed, with rates of their own, and sharing what there is to do by what each can.

Real coordinator, real shard, real gradients; only the seconds are virtual.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean, variance
from typing import Any

import pytest

from orchestray.trainers.ps.protocol.assignments import Compute
from support.ledger_time import Simulation
from support.virtual_training import LeastSquares, VirtualTraining

NUM_WORKERS = 4
RATE = 0.3


def uneven(seed: int, factor: float) -> Callable[[int], float]:
    """Return times of shares of about a second; those of worker 0 take `factor` times as long."""
    rng = random.Random(seed)
    return lambda worker: rng.uniform(0.8, 1.2) * (factor if worker == 0 else 1.0)


def later_losses(seed: int, **options: Any) -> list[float]:
    """Return the losses of the second half of a run, above the least possible; one worker is five times slower."""
    problem = LeastSquares(seed)
    run = VirtualTraining(problem, uneven(seed, 5.0), NUM_WORKERS, batch_size=24, epochs=10, **options).run()
    return [loss - problem.least() for loss in run.losses[len(run.losses) // 2 :]]


def test_heterogeneity_aware_servers_are_steadier_than_ssp_and_plain_asynchrony_at_the_same_rate() -> None:
    bounded: dict[str, Any] = {"consistency": "stale", "staleness": 4, "lr": RATE}
    decoupled = [later_losses(seed, decoupled=True, **bounded) for seed in range(5)]
    stale = [later_losses(seed, **bounded) for seed in range(5)]
    # Plain asynchrony adds each worker's whole step; pushes here are weighted by 1 / workers, the paper's constant one.
    plain = [later_losses(seed, consistency="asynchronous", lr=RATE * NUM_WORKERS) for seed in range(5)]
    for mine, ssp, whole in zip(decoupled, stale, plain, strict=True):
        assert mean(mine) < 0.5 * min(mean(ssp), mean(whole))
    assert mean(map(variance, decoupled)) < 0.1 * min(mean(map(variance, stale)), mean(map(variance, plain)))


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_workers_with_rates_of_their_own_are_never_further_ahead_than_the_bound(bound: int) -> None:
    """Let one of them be five times slower: the others wait for it, and read all changes of the batches before."""
    lead: list[int] = []

    class Watched(VirtualTraining):
        def read(self, worker: int, order: Compute) -> None:
            super().read(worker, order)
            lead.append(order.step - 1 - self.coordinator.step)
            assert order.min_version == self.coordinator.step

    keys: dict[str, Any] = {"batch_size": 24, "epochs": 4, "lr": RATE}
    run = Watched(
        LeastSquares(0), uneven(0, 5.0), NUM_WORKERS, consistency="stale", staleness=bound, decoupled=True, **keys
    )
    run.run()
    assert max(lead) == bound
    assert len(run.losses) == len(run.staleness) == 20 * NUM_WORKERS  # every push moved the weights at once


def test_with_workers_of_one_speed_a_rate_of_their_own_is_about_synchronous() -> None:
    for seed in range(3):
        problem = LeastSquares(seed)
        keys: dict[str, Any] = {"batch_size": 24, "epochs": 10, "lr": 0.1}
        synchronous = VirtualTraining(problem, uneven(seed, 1.0), NUM_WORKERS, **keys).run()
        decoupled = VirtualTraining(
            problem, uneven(seed, 1.0), NUM_WORKERS, consistency="asynchronous", decoupled=True, **keys
        ).run()
        assert decoupled.losses[-1] == pytest.approx(synchronous.losses[-1], rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_asynchronous_load_balancing_gives_each_worker_what_it_can_do(seed: int) -> None:
    run = Simulation(uneven(seed, 2.0), 3, consistency="asynchronous", epochs=20).run()
    samples = run.coordinator.progress.samples_by_worker
    total = 20 * 120
    assert sum(samples.values()) == total
    # A share of 4 samples takes 1 s, of the slow worker 2 s; a sum of n of them is off by 0.115 sqrt(n) s at one sigma.
    assert samples[0] / samples[1] == pytest.approx(0.5, rel=0.06)
    assert samples[0] / samples[2] == pytest.approx(0.5, rel=0.06)
    assert total / run.now_s == pytest.approx(4 / 2 + 4 + 4, rel=0.04)
