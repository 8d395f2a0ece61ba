"""Centralised runs without tensors: what every shard has taken in, by sample, while workers come, go and crash."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, DoneStep, Finish, Order, Save, Validate, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings

Position = tuple[int, int]
"""Epoch, and position in it."""


def loss_of(position: Position) -> float:
    """Return the loss of a sample; different for each."""
    epoch, index = position
    return 1.0 + 0.37 * index + 0.011 * epoch


def samples_of(order: Compute) -> list[Position]:
    return [(order.epoch, index) for start, stop in order.pieces for index in range(start, stop)]


def part_of_loss(order: Compute) -> float:
    """Return what `Network.backward` returns for a share."""
    return sum(map(loss_of, samples_of(order))) / order.batch_samples


class Twins:
    """A coordinator and, from some point on, the one made from its JSON: both get all inputs and must agree."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.coordinator = Coordinator(settings)
        self._twin: Coordinator | None = None

    def fork(self) -> None:
        told = json.dumps(self.coordinator.to_json())
        self._twin = Coordinator.from_json(json.loads(told))
        assert json.dumps(self._twin.to_json()) == told

    def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        result = getattr(self.coordinator, method)(*args, **options)
        if self._twin is not None:
            assert getattr(self._twin, method)(*args, **options) == result, method
            assert self._twin.settled == self.coordinator.settled
            assert self._twin.ended == self.coordinator.ended
        return result


class Shards:
    """Shards that each take in a share once, by the id of its order."""

    def __init__(self, num_shards: int) -> None:
        self.taken: list[dict[int, Compute]] = [{} for _ in range(num_shards)]
        self.duplicates = 0

    def push(self, shard: int, order: Compute, settled: int) -> None:
        known = self.taken[shard]
        if order.order_id in known or order.order_id < settled:
            self.duplicates += 1
            assert order.order_id in known, "a share that the coordinator calls done never came to this shard"
            assert samples_of(known[order.order_id]) == samples_of(order)
            return
        known[order.order_id] = order

    def samples(self, shard: int) -> Counter[Position]:
        return Counter(position for order in self.taken[shard].values() for position in samples_of(order))


@dataclass
class Worker:
    """One process: what it computes and how far it is with its pushes."""

    rank: int
    orders: list[tuple[Compute, int]] = field(default_factory=list)
    """With the version of the parameters each was read from; the first is the one in hand."""
    to_push: list[int] | None = None
    """Shards that have not taken in the first order; None: it has not been claimed."""
    duty: Validate | Save | None = None
    finished: Finish | None = None


class Trace:
    """A run in which the next event is drawn at random; it ends when every worker has the order to finish."""

    def __init__(
        self, settings: CoordinatorSettings, rng: random.Random, *, num_workers: int, num_shards: int = 2
    ) -> None:
        self.settings = settings
        self.rng = rng
        self.coordinator = Twins(settings)
        self.shards = Shards(num_shards)
        self.workers: dict[int, Worker] = {}
        self.late: list[tuple[int, Compute]] = []
        """Pushes of workers that are lost, still on their way."""
        self.steps: list[DoneStep] = []
        self.staleness: list[int] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.parts_done: Counter[tuple[int, int, int]] = Counter()
        self.saves: list[int] = []
        self.dropped = 0
        self.crashes = 0
        self.stop_asked_at: int | None = None
        """The last step that had begun when somebody first wanted the run to end."""
        self.chance_of: dict[str, float] = {}
        self.on_event: Callable[[], None] = lambda: None
        for rank in range(num_workers):
            self.join(rank)

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, rank: int) -> None:
        self.workers[rank] = Worker(rank)
        self.coordinator("join", rank)

    def crash(self, rank: int) -> None:
        """Lose a worker wherever it is; what it had sent may arrive all the same, in part."""
        worker = self.workers.pop(rank)
        if worker.to_push:
            self.late += [(shard, worker.orders[0][0]) for shard in worker.to_push if self.rng.random() < 0.5]
        self.coordinator("leave", rank)
        self.crashes += 1

    def stop(self) -> None:
        """Request the end of the run."""
        reason = self.rng.choice(["interrupted", "time_limit_s"])
        if self.stop_asked_at is None:
            self.stop_asked_at = self.coordinator.coordinator.begun_step
        self.coordinator("request_stop", reason, validate=reason == "time_limit_s")

    def run(self, most_events: int = 20000) -> None:
        for _ in range(most_events):
            if self.workers and all(worker.finished for worker in self.workers.values()):
                return
            self.on_event()
            self._event()
        raise AssertionError(f"not at an end after {most_events} events")

    def _event(self) -> None:
        rng, chance = self.rng, self.chance_of
        if rng.random() < chance.get("fork", 0.0):
            self.coordinator.fork()
        if self.late and rng.random() < 0.3:
            shard, order = self.late.pop(rng.randrange(len(self.late)))
            self.shards.push(shard, order, self.coordinator.coordinator.settled)
        if rng.random() < chance.get("join", 0.0) or not self.workers:
            gone = [rank for rank in range(6) if rank not in self.workers]
            if gone:
                self.join(rng.choice(gone))
        if self.workers and rng.random() < chance.get("crash", 0.0):
            self.crash(rng.choice(sorted(self.workers)))
        if rng.random() < chance.get("resize", 0.0):
            self.coordinator("resize", rng.randint(1, 5))
        if rng.random() < chance.get("stop", 0.0):
            self.stop()
        busy = [worker for worker in self.workers.values() if not worker.finished]
        if busy:
            self._advance(rng.choice(busy))
        self._check_somebody_can_go_on()

    def _advance(self, worker: Worker) -> None:
        if worker.duty is not None:
            self._do_duty(worker, worker.duty)
        elif worker.to_push is not None:
            self._push(worker)
        elif worker.orders and (len(worker.orders) >= self.settings.lookahead or self.rng.random() < 0.5):
            order, _ = worker.orders[0]
            if self.settings.backup_workers == 0 and self.rng.random() < 0.5:
                worker.to_push = list(range(len(self.shards.taken)))  # without copies a claim is implied
            elif self.coordinator("claim", worker.rank, order.order_id):
                worker.to_push = list(range(len(self.shards.taken)))
                self.rng.shuffle(worker.to_push)
            else:
                self.dropped += 1
                worker.orders.pop(0)
        else:
            self.ask(worker)

    def ask(self, worker: Worker) -> Order:
        holding: Collection[int] | None = None
        if self.rng.random() < self.chance_of.get("lost_answer", 0.0):
            self.coordinator("next", worker.rank, [order.order_id for order, _ in worker.orders])  # never arrives
        if self.chance_of.get("lost_answer"):
            holding = [order.order_id for order, _ in worker.orders]
        order: Order = self.coordinator("next", worker.rank, holding)
        match order:
            case Compute():
                self._check_order(order)
                # It reads some time later: at least what the order says, at most what there is then.
                worker.orders.append((order, order.min_version))
            case Validate() | Save():
                worker.duty = order
                self.check_everything_applied_up_to(order.step)
            case Finish():
                worker.finished = order
            case Wait():
                assert order.drain == bool(worker.orders or self._still_held(worker))
        return order

    def _still_held(self, worker: Worker) -> bool:
        return bool(self.coordinator.coordinator._scheduler.held(worker.rank))

    def _push(self, worker: Worker) -> None:
        assert worker.to_push is not None
        order, version = worker.orders[0]
        if worker.to_push:
            self.shards.push(worker.to_push.pop(), order, self.coordinator.coordinator.settled)
            return
        worker.orders.pop(0)
        worker.to_push = None
        loss, took = part_of_loss(order), self._timed()
        ack = self.coordinator("acknowledge", worker.rank, order.order_id, loss, read_version=version, **took)
        if self.rng.random() < 0.2:  # the answer was lost
            again = self.coordinator("acknowledge", worker.rank, order.order_id, loss, read_version=version)
            assert again.counts == ack.counts
            assert not again.done_steps
        assert ack.counts or self.settings.backup_workers == 0
        if ack.counts and self.settings.bound is not None:
            self.staleness.append(order.step - 1 - version)
        self.steps += ack.done_steps
        self.dropped += len(ack.dropped)
        for rank in ack.dropped:  # ordered to give up
            self._give_up(self.workers[rank], order.order_id)

    def _timed(self) -> dict[str, float]:
        """Return the server's report of the time of a share: a number or nothing; never where shares are even."""
        if self.settings.balance == "even" or self.rng.random() < 0.2:
            return {}
        return {"took_s": self.rng.choice([0.0, 0.01, 0.1, 1.0, 10.0]) * self.rng.random()}

    @staticmethod
    def _give_up(worker: Worker, order_id: int) -> None:
        if worker.orders and worker.orders[0][0].order_id == order_id:
            worker.to_push = None
        worker.orders = [held for held in worker.orders if held[0].order_id != order_id]

    def _do_duty(self, worker: Worker, duty: Validate | Save) -> None:
        worker.duty = None
        if isinstance(duty, Save):
            assert self.coordinator("saved", worker.rank, duty.order_id)
            self.saves.append(duty.step)
            return
        count = self.settings.num_validation_samples
        part = [index for index in range(count) if index % duty.num_parts == duty.part]
        self.parts_done[duty.step, duty.part, duty.num_parts] += 1
        means = self.coordinator("validated", worker.rank, duty.order_id, {"loss": sum(float(i) for i in part)})
        if means is not None:
            self.validations.append((duty.step, means))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check_everything_applied_up_to(self, step: int) -> None:
        """Check that every shard has every sample of the steps so far once, and no other."""
        for shard in range(len(self.shards.taken)):
            assert self.shards.samples(shard) == Counter(self.samples_through(step))

    def samples_through(self, step: int) -> list[Position]:
        start, stop = (self.settings.samples_through(at) for at in (self.settings.start_step, step))
        return [divmod(sample, self.settings.num_samples) for sample in range(start, stop)]

    def _check_order(self, order: Compute) -> None:
        if self.settings.bound is not None:
            completed = self.coordinator.coordinator.step
            assert order.step - 1 - completed <= self.settings.bound
            assert completed == order.min_version

    def _check_somebody_can_go_on(self) -> None:
        idle = [w for w in self.workers.values() if not (w.orders or w.duty or w.finished)]
        if not idle or len(idle) < sum(not w.finished for w in self.workers.values()):
            return
        coordinator = Coordinator.from_json(self.coordinator.coordinator.to_json())  # only looks
        orders = [coordinator.next(worker.rank, []) for worker in idle]
        assert not all(isinstance(order, Wait) for order in orders), orders
