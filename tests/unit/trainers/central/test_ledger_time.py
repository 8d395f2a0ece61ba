"""The ledger in virtual time: what stragglers cost under each consistency, and how stale their gradients are."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.orders import Compute, Finish, Save, Validate, Wait
from orchestray.trainers.central.plan import LedgerSettings

SLOW = 10.0
"""A straggler's time for a share, where the others need 1."""


class Simulation:
    """Workers that take their time; a push is instantaneous, and the parameters are read when the order comes."""

    def __init__(self, seconds_of: Callable[[int], float], num_workers: int, **options: Any) -> None:
        given = {"num_samples": 120, "batch_size": 12, "num_validation_samples": 1, "epochs": 4, **options}
        given.setdefault("num_shares", num_workers - given.get("backup_workers", 0))
        given.setdefault("validate_every_steps", 1000)
        self.ledger = Ledger(LedgerSettings(**given))
        self._seconds_of = seconds_of
        self._queue: list[tuple[float, int, Compute, int]] = []
        self._idle = list(range(num_workers))
        self.now_s = 0.0
        self.step_at_s: dict[int, float] = {}
        self.applied: Counter[tuple[int, int]] = Counter()
        self.staleness: list[int] = []
        self.copies = 0
        for worker in range(num_workers):
            self.ledger.join(worker)

    def version(self) -> int:
        synchronised = self.ledger.settings.bound is not None
        return self.ledger.step if synchronised else self.ledger.accounts.num_pushes

    def run(self) -> Simulation:
        while not self.ledger.ended:
            self._hand_out()
            if self._queue:
                self._finish(*heapq.heappop(self._queue))
        return self

    def _hand_out(self) -> None:
        for worker in list(self._idle):
            order = self.ledger.next(worker)
            match order:
                case Compute():
                    self._idle.remove(worker)
                    self.copies += order.copy
                    entry = (self.now_s + self._seconds_of(worker), worker, order, self.version())
                    heapq.heappush(self._queue, entry)
                case Validate():
                    self.ledger.validated(worker, order.order_id, {})
                case Save():
                    self.ledger.saved(worker, order.order_id)
                case Wait() | Finish():
                    pass

    def _finish(self, now_s: float, worker: int, order: Compute, version: int) -> None:
        self.now_s = now_s
        self._idle.append(worker)
        if not self.ledger.claim(worker, order.order_id):
            return
        write = order.step - 1 if self.ledger.settings.bound is not None else self.version()
        ack = self.ledger.acknowledge(worker, order.order_id, 1.0, read_version=version, write_version=write)
        assert ack.counts
        self.staleness.append(write - version)
        self.applied.update((order.epoch, at) for start, stop in order.pieces for at in range(start, stop))
        self.step_at_s |= {step.step: now_s for step in ack.done_steps}


def straggler(seed: int = 0, slow_worker: int = 0) -> Callable[[int], float]:
    """Random delays around 1 s; one worker takes ten times as long."""
    rng = random.Random(seed)
    return lambda worker: rng.uniform(0.5, 1.5) * (SLOW if worker == slow_worker else 1.0)


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_ssp_staleness_never_exceeds_its_bound_and_comes_up_to_it(bound: int, num_workers: int) -> None:
    largest = 0
    for seed in range(10):
        run = Simulation(straggler(seed), num_workers, consistency="stale", staleness=bound).run()
        assert all(0 <= value <= bound for value in run.staleness)
        largest = max(largest, *run.staleness)
        assert run.ledger.accounts.staleness == Counter(run.staleness)
        assert set(run.applied.values()) == {1}
    assert largest == bound


def test_ssp_with_a_bound_of_zero_hands_out_what_a_synchronous_run_does() -> None:
    runs = [
        Simulation(straggler(3), 3, consistency=consistency, staleness=0).run()
        for consistency in ("synchronous", "stale")
    ]
    assert runs[0].step_at_s == runs[1].step_at_s
    assert runs[0].ledger.accounts.samples_by_worker == runs[1].ledger.accounts.samples_by_worker
    assert set(runs[0].staleness) == {0}


def test_asynchronous_workers_take_shares_by_their_speed() -> None:
    run = Simulation(straggler(), 4, consistency="asynchronous").run()
    samples = run.ledger.accounts.samples_by_worker
    assert set(run.applied.values()) == {1}
    for fast in (1, 2, 3):
        assert samples[fast] / samples[0] == pytest.approx(SLOW, rel=0.4)


def test_each_worker_of_a_synchronous_or_stale_run_takes_the_same_number_of_shares_whatever_its_speed() -> None:
    for bound in (0, 3):
        run = Simulation(straggler(), 3, consistency="stale", staleness=bound).run()
        assert set(run.ledger.accounts.samples_by_worker.values()) == {160}


def test_an_asynchronous_run_with_a_straggler_takes_less_than_half_the_time_of_a_synchronous_one() -> None:
    seconds = {
        consistency: Simulation(straggler(), 4, consistency=consistency).run().now_s
        for consistency in ("synchronous", "asynchronous")
    }
    assert seconds["asynchronous"] < 0.5 * seconds["synchronous"]
    assert seconds["synchronous"] > 40 * 0.5 * SLOW


def test_a_stale_run_waits_for_passing_delays_only_as_far_as_its_bound_says() -> None:
    """Each share takes ten times as long with a chance of one in ten: a run that may lead waits less for these."""

    def delayed(seed: int) -> Callable[[int], float]:
        rng = random.Random(seed)
        return lambda worker: SLOW if rng.random() < 0.1 else 1.0

    def seconds(bound: int) -> float:
        return sum(Simulation(delayed(seed), 4, consistency="stale", staleness=bound).run().now_s for seed in range(10))

    synchronous, near, far = (seconds(bound) for bound in (0, 2, 8))
    assert far < near < synchronous
    assert far < 0.7 * synchronous


def test_a_backup_worker_hides_a_straggler_and_drops_no_sample() -> None:
    plain = Simulation(straggler(), 3).run()
    redundant = Simulation(straggler(), 4, backup_workers=1).run()
    assert redundant.now_s < 0.4 * plain.now_s
    for run in (plain, redundant):
        assert run.applied == Counter({(epoch, at): 1 for epoch in range(4) for at in range(120)})
        assert set(run.staleness) == {0}
    accounts = redundant.ledger.accounts
    assert 0 < accounts.dropped_copies <= redundant.copies
    assert plain.ledger.accounts.dropped_copies == plain.copies == 0


def test_copies_cost_workers_of_equal_speed_no_time() -> None:
    plain = Simulation(lambda worker: 1.0, 3).run()
    redundant = Simulation(lambda worker: 1.0, 4, backup_workers=1).run()
    assert redundant.now_s == plain.now_s
