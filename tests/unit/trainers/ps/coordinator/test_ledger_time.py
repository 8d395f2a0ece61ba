"""The coordinator in virtual time: what delays cost under each consistency, and how stale gradients are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.ledger_time import SLOW, Simulation, straggler


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_ssp_staleness_never_exceeds_its_bound_and_comes_up_to_it(bound: int, num_workers: int) -> None:
    largest = 0
    for seed in range(10):
        run = Simulation(straggler(seed), num_workers, consistency="stale", staleness=bound).run()
        assert all(0 <= value <= bound for value in run.staleness)
        largest = max(largest, *run.staleness)
        assert run.coordinator.progress.staleness == Counter(run.staleness)
        assert set(run.applied.values()) == {1}
    assert largest == bound


def test_ssp_with_a_bound_of_zero_hands_out_what_a_synchronous_run_does() -> None:
    runs = [
        Simulation(straggler(3), 3, consistency=consistency, staleness=0).run()
        for consistency in ("synchronous", "stale")
    ]
    assert runs[0].step_at_s == runs[1].step_at_s
    assert runs[0].coordinator.progress.samples_by_worker == runs[1].coordinator.progress.samples_by_worker
    assert set(runs[0].staleness) == {0}


def test_asynchronous_workers_take_shares_by_their_speed() -> None:
    run = Simulation(straggler(), 4, consistency="asynchronous").run()
    samples = run.coordinator.progress.samples_by_worker
    assert set(run.applied.values()) == {1}
    for fast in (1, 2, 3):
        assert samples[fast] / samples[0] == pytest.approx(SLOW, rel=0.4)


def test_each_worker_of_a_synchronous_or_stale_run_takes_the_same_number_of_shares_whatever_its_speed() -> None:
    for bound in (0, 3):
        run = Simulation(straggler(), 3, consistency="stale", staleness=bound).run()
        assert set(run.coordinator.progress.samples_by_worker.values()) == {160}


def delayed(seed: int) -> Callable[[int], float]:
    """Let each share take ten times as long with a chance of one in ten."""
    rng = random.Random(seed)
    return lambda worker: SLOW if rng.random() < 0.1 else 1.0


def test_from_lock_step_to_asynchrony_workers_wait_for_each_other_less_and_gradients_are_staler() -> None:
    waits, stalest = [], []
    spectrum: list[dict[str, Any]] = [
        {"consistency": "synchronous"},
        *({"consistency": "stale", "staleness": bound} for bound in (1, 4)),
        {"consistency": "asynchronous"},
    ]
    for point in spectrum:
        runs = [Simulation(delayed(seed), 4, **point).run() for seed in range(5)]
        waits.append(sum(run.num_waits for run in runs))
        stalest.append(max(max(run.staleness) for run in runs))
    assert waits[0] > waits[1] > waits[2] > waits[3] == 0
    assert stalest[:3] == [0, 1, 4]
    assert stalest[3] > 4


def test_a_stale_run_waits_for_passing_delays_only_as_far_as_its_bound_says() -> None:
    def seconds(bound: int) -> float:
        return sum(Simulation(delayed(seed), 4, consistency="stale", staleness=bound).run().now_s for seed in range(10))

    synchronous, near, far = (seconds(bound) for bound in (0, 2, 8))
    assert far < near < synchronous
    assert far < 0.7 * synchronous


def test_copies_cost_workers_of_equal_speed_no_time() -> None:
    plain = Simulation(lambda worker: 1.0, 3).run()
    redundant = Simulation(lambda worker: 1.0, 4, backup_workers=1).run()
    assert redundant.now_s == plain.now_s
