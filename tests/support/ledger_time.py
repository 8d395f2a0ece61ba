"""Centralised runs in virtual time: real ledgers, workers that only take their time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, DoneStep, Finish, Save, Validate, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings

SLOW = 10.0
"""A straggler's time for a share, where the others need 1."""


class Simulation:
    """Workers that take their time; a push is instantaneous, and the parameters are read when the order comes.

    A share takes longer in proportion to its samples, if it has more than an even one.
    """

    def __init__(self, seconds_of: Callable[[int], float], num_workers: int, **options: Any) -> None:
        given = {"num_samples": 120, "batch_size": 12, "num_validation_samples": 1, "epochs": 4, **options}
        given.setdefault("num_shares", num_workers - given.get("backup_workers", 0))
        given.setdefault("validate_every_steps", 1000)
        self.coordinator = Coordinator(CoordinatorSettings(**given))
        self._seconds_of = seconds_of
        self._even = self.coordinator.settings.batch_size / self.coordinator.settings.num_shares
        self._queue: list[tuple[float, int, Compute, int]] = []
        self._begun_s: dict[int, float] = {}
        self._idle = list(range(num_workers))
        self._idle_since_s = dict.fromkeys(range(num_workers), 0.0)
        self.num_waits = 0
        """Shares that a worker could not begin at once, as it had to wait for others."""
        self.now_s = 0.0
        self.step_at_s: dict[int, float] = {}
        self.applied: Counter[tuple[int, int]] = Counter()
        self.staleness: list[int] = []
        self.copies = 0
        self.sizes: list[tuple[int, int, int]] = []
        """Batch, worker and samples of each share that was computed."""
        for worker in range(num_workers):
            self.coordinator.join(worker)

    def version(self) -> int:
        synchronised = self.coordinator.settings.bound is not None
        return self.coordinator.step if synchronised else self.coordinator.progress.num_pushes

    def run(self) -> Simulation:
        while not self.coordinator.ended:
            self._hand_out()
            if self._queue:
                self._finish(*heapq.heappop(self._queue))
        return self

    def read(self, worker: int, order: Compute) -> None:
        """Note that a worker reads the parameters it computes a share with."""

    def write(self, worker: int, order: Compute, done_steps: Sequence[DoneStep]) -> None:
        """Note that a worker's push is there and counts; `done_steps` are complete by it."""

    def _hand_out(self) -> None:
        for worker in list(self._idle):
            order = self.coordinator.next(worker)
            match order:
                case Compute():
                    self._idle.remove(worker)
                    self.num_waits += self.now_s > self._idle_since_s[worker]
                    self.copies += order.copy
                    self.read(worker, order)
                    self._begun_s[worker] = self.now_s
                    took_s = self._seconds_of(worker) * (order.num_samples / self._even)
                    heapq.heappush(self._queue, (self.now_s + took_s, worker, order, self.version()))
                case Validate():
                    self.coordinator.validated(worker, order.order_id, {})
                case Save():
                    self.coordinator.saved(worker, order.order_id)
                case Wait() | Finish():
                    pass

    def _finish(self, now_s: float, worker: int, order: Compute, version: int) -> None:
        self.now_s = now_s
        self._idle.append(worker)
        self._idle_since_s[worker] = now_s
        if not self.coordinator.claim(worker, order.order_id):
            return
        write = order.step - 1 if self.coordinator.settings.bound is not None else self.version()
        versions, took_s = {"read_version": version, "write_version": write}, now_s - self._begun_s[worker]
        ack = self.coordinator.acknowledge(worker, order.order_id, 1.0, **versions, took_s=took_s)
        assert ack.counts
        self.staleness.append(write - version)
        self.sizes.append((order.step, worker, order.num_samples))
        self.write(worker, order, ack.done_steps)
        self.applied.update((order.epoch, at) for start, stop in order.pieces for at in range(start, stop))
        self.step_at_s |= {step.step: now_s for step in ack.done_steps}


def straggler(seed: int = 0, slow_worker: int = 0) -> Callable[[int], float]:
    """Return random delays around 1 s; one worker takes ten times as long."""
    rng = random.Random(seed)
    return lambda worker: rng.uniform(0.5, 1.5) * (SLOW if worker == slow_worker else 1.0)
