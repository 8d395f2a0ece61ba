"""Under a rule that withstands some wrong workers no worker answers for two of them."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from support.ledger_traces import Trace
from support.ledgers import compute
from support.seeds import a_few_and


def settings(**options: Any) -> CoordinatorSettings:
    given = {"num_samples": 40, "num_validation_samples": 7, "batch_size": 10, "num_shares": 3, "epochs": 1, **options}
    return CoordinatorSettings(**given, one_share_each=True)


def coordinator(*workers: int, **options: Any) -> Coordinator:
    made = Coordinator(settings(**options))
    for worker in workers:
        made.join(worker)
    return made


def done(run: Coordinator, worker: int, order: Compute) -> None:
    assert run.acknowledge(worker, order.order_id, 0.0, read_version=order.min_version).counts


def test_who_comes_first_gets_one_share_and_waits_for_the_others() -> None:
    run = coordinator(1)
    done(run, 1, compute(run, 1))
    assert run.next(1) == Wait()
    run.join(0)
    run.join(2)
    assert [compute(run, worker).share for worker in (0, 2)] == [1, 2]
    assert run.next(1) == Wait()


def test_the_share_of_a_lost_worker_waits_for_who_comes_in_its_place() -> None:
    run = coordinator(0, 1, 2)
    lost, *_ = [compute(run, worker) for worker in range(3)]
    done(run, 1, run._scheduler.held(1)[0].order)
    run.leave(0)
    assert run.next(1) == Wait()
    run.join(0)
    assert compute(run, 0) == lost


def test_a_worker_that_comes_back_gets_no_second_share_of_the_batch() -> None:
    run = coordinator(0, 1, 2)
    orders = [compute(run, worker) for worker in range(3)]
    done(run, 1, orders[1])
    for worker in (0, 1):
        run.leave(worker)
    run.join(1)
    assert run.next(1) == Wait()
    run.join(0)
    assert compute(run, 0) == orders[0]


def test_where_there_are_to_be_fewer_workers_they_compute_the_rest_of_the_batch() -> None:
    run = coordinator(0, 1, 2)
    orders = [compute(run, worker) for worker in range(3)]
    done(run, 0, orders[0])
    run.leave(2)
    assert run.next(0) == Wait()
    run.resize(2)
    assert compute(run, 0) == orders[2]


def test_a_copy_goes_to_a_worker_without_a_share_of_its_own() -> None:
    run = coordinator(0, 1, 2, 3, backup_workers=1)
    orders = [compute(run, worker) for worker in range(3)]
    done(run, 0, orders[0])
    assert run.next(0) == Wait()
    assert compute(run, 3).copy
    done(run, 3, orders[1])
    assert run.next(3) == Wait()


@a_few_and(range(20, 100))
@pytest.mark.parametrize("backup_workers", [0, 1])
def test_no_worker_answers_for_two_shares_of_a_batch_whatever_is_lost(backup_workers: int, seeds: range) -> None:
    crashes = 0
    for seed in seeds:
        rng, num_shares = random.Random(seed), 1 + seed % 5
        chosen = settings(num_shares=num_shares, backup_workers=backup_workers, epochs=3)
        trace = AllComeBack(chosen, rng, num_workers=rng.randint(0, num_shares + backup_workers))
        trace.chance_of = {"crash": 0.03, "join": 0.04, "fork": 0.01, "lost_answer": 0.05 * (seed % 2)}
        trace.run()
        trace.check_everything_applied_up_to(chosen.last_step)
        crashes += trace.crashes
        for step, workers in trace.answered.items():
            assert len(workers) == len(set(workers)), step
    assert crashes > len(seeds) / 2


class AllComeBack(Trace):
    """A trace in which another worker comes where none can go on.

    It notes whose gradient of each share counts.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        self.answered: dict[int, list[int]] = defaultdict(list)
        super().__init__(*given, **options)

    def _push(self, worker: Any) -> None:
        order, before = worker.orders[0][0], self.coordinator.coordinator.progress.num_pushes
        super()._push(worker)
        if self.coordinator.coordinator.progress.num_pushes > before:
            self.answered[order.step].append(worker.rank)

    def _check_somebody_can_go_on(self) -> None:
        expected = self.settings.num_shares + self.settings.backup_workers
        gone = [rank for rank in range(expected) if rank not in self.workers]
        try:
            super()._check_somebody_can_go_on()
        except AssertionError:
            if not gone:
                raise
            self.join(gone[0])
