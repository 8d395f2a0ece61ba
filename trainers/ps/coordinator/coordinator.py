"""The coordinator of a centralised run: which worker computes which samples, whose push is applied, and when all stop.

The lead server holds a `Coordinator`. It is a state machine without time, randomness or I/O: its inputs are method
calls, its whole state goes to JSON and back, and the same inputs give the same outputs. So a backup of the lead that
receives the inputs in the same order is the same coordinator, and a checkpoint can hold it.

The gradient of a share enters the parameters exactly once, whatever is lost on the way:

1.  `next` hands a worker a `Compute`. Its `order_id` names the share, for every worker that computes it and every time
    it is handed out. A shard knows the share by its step and its index in the batch (`SeenShares`).
2.  The worker pulls parameters of at least `min_version` from every shard, and computes.
3.  `claim(worker, order_id)` BEFORE any shard applies the gradient. One worker at a time has the claim. A worker that
    is refused discards its gradient: a copy was first, or the lead has given the worker up.
4.  The worker pushes its slices to all shards, in any order. A shard applies a slice unless it already has one of this
    share. It answers in both cases: a repeated push is as good as the first.
5.  `acknowledge(worker, order_id, ...)` once ALL shards have answered. From here on the share is done.

Only copies need step 3: without `backup_workers` a share has one holder, whose acknowledgement implies the claim.

A worker that is lost (`leave`) before step 3 leaves only the share, which is handed out again; after step 5 it leaves
nothing. A worker lost between them has pushed to some shards and not to others. Its claim then goes back with the
share. The next worker computes the same samples and pushes to all shards, but only the shards that lack the share apply
it. So no shard lacks it and none has it twice. Late slices of the lost worker may still arrive: they are duplicates, or
make the later ones duplicates.

A shard that updates once per batch (synchronous, stale) keeps the pushes of batch c until it learns that c is complete.
A pull or push of an order whose `min_version` is at least c shows this. So does a `Save`, `Validate` or `Finish` of the
same or a later step. So the parameters that batch c was computed from stay until no worker can be ordered to compute a
share of it again. A share that is computed twice therefore has the same gradient twice. An asynchronous shard updates
at once; two slices of one share may then belong to two gradients, each of that share.

All orders with an id below `settled` are done, and any push of them is a duplicate.

With `balance: speed` the sizes of shares follow the speeds of the workers (see `load_balancing`). The coordinator does
not measure time: an acknowledgement says how long the share took.

Requests may be repeated, as by a worker whose lead was replaced before it answered. A claim that was granted is granted
again. A share that was acknowledged is acknowledged again, and nothing is counted twice. `next` with the ids that the
worker holds returns the order that the worker did not receive. A `Wait` is not sent to the worker, except
`Wait(drain=True)`: hold the request back and call `next` again after the next input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.coordinator.barrier import Barrier
from orchestray.trainers.ps.coordinator.progress import AppliedProgress
from orchestray.trainers.ps.coordinator.share_scheduler import ShareScheduler
from orchestray.trainers.ps.protocol.assignments import LEFT, Ack, Compute, Finish, Order, Wait
from orchestray.trainers.ps.protocol.json_state import Numbers, from_json, to_json
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings


class NotJoinedError(TrainingError, ValueError):
    """Raised for a worker that has not joined, or was given up; it must say hello again."""


@dataclass(init=False, eq=False)
class Coordinator:
    """The coordinator as a state machine; the module docstring describes the protocol.

    Workers are numbers. `next` and `next_shares` raise NotJoinedError for a worker that has not joined.
    """

    settings: CoordinatorSettings
    progress: AppliedProgress
    """Applied steps, and the statistics `staleness`, `samples_by_worker`, `dropped_copies` and `num_pushes`."""
    _scheduler: ShareScheduler
    _barrier: Barrier
    _dismissed: Numbers
    _acknowledged: dict[int, list[int]]
    """Last acknowledged order ids of each worker, as many as it may ask about again."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        step = settings.start_step
        self.settings = settings
        self.progress = AppliedProgress(settings, step, settings.samples_through(step))
        self._scheduler = ShareScheduler(settings, settings.num_shares, step)
        self._barrier = Barrier(settings, step, step, settings.start_best)
        self._dismissed, self._acknowledged = set(), {}

    # -- workers -----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers that have joined, in rising order."""
        return sorted(self._scheduler.clocks)

    def join(self, worker: int) -> None:
        """Add a worker. If it had joined before, it has restarted, and the shares that it held are handed out again."""
        self.leave(worker)
        self._scheduler.join(worker, self.progress.step)

    def leave(self, worker: int) -> None:
        """Remove a lost worker: its orders are handed out again, before all others. What it acknowledged stays."""
        self._scheduler.leave(worker)
        self._barrier.leave(worker)
        self._acknowledged.pop(worker, None)
        self._dismissed.discard(worker)

    def dismiss(self, worker: int) -> None:
        """Have a worker leave, with `Finish(LEFT)`, once it has done what it holds. An absent worker is ignored."""
        if worker in self._scheduler.clocks:
            self._dismissed.add(worker)

    def resize(self, num_shares: int) -> None:
        """Cut batches into `num_shares` shares, from the first batch that has not begun."""
        if num_shares < 1:
            raise ValueError(f"num_shares must be at least 1, got {num_shares}")
        self._scheduler.num_shares = num_shares

    # -- orders and reports ------------------------------------------------------------------------------------------

    def next(self, worker: int, holding: Collection[int] | None = None) -> Order:
        """Return what a worker does next.

        Args:
            worker: number of the worker that asks.
            holding: ids of all orders that the worker has and has not reported on. An order that it was given and that
                is not among them was lost on the way and is given again. None: nothing was lost.
        """
        self._check(worker)
        held = self._scheduler.held(worker)
        if holding is not None:
            for share in held:
                if share.order.order_id not in holding:
                    return self._scheduler.again(worker, share, self.progress.step)
            if (lost := self._barrier.lost(worker, holding)) is not None:
                return lost
        if worker in self._dismissed:
            return Wait(drain=True) if held else Finish(LEFT)
        may_begin = self._barrier.due_after(self._scheduler.begun) is None
        if len(held) < self.settings.lookahead:
            order = self._scheduler.take(worker, self.progress.step, may_begin)
            if order is None and not held:
                order = self._scheduler.copy(worker, self.progress.step)
            if order is not None:
                return order
        if self._scheduler.shares or may_begin:
            return Wait(drain=bool(held))
        return self._barrier.next(worker, self._scheduler.begun, self.workers, self._scheduler.new_id)

    def next_shares(self, worker: int, number: int) -> list[Compute]:
        """Return up to `number` more shares for a worker, besides those that it holds.

        They are the shares that `next` would give it one after the other, up to the first that another worker computes
        too.
        """
        self._check(worker)
        scheduler, found = self._scheduler, list[Compute]()
        room = self.settings.lookahead - len(scheduler.held(worker))
        while len(found) < min(number, room):
            may_begin = self._barrier.due_after(scheduler.begun) is None
            order = scheduler.take(worker, self.progress.step, may_begin)
            if order is None:
                break
            found.append(order)
        return found

    def holds(self, worker: int, order_id: int) -> bool:
        """Return True if a worker is to compute a share, and no other has finished it."""
        share = self._scheduler.shares.get(order_id)
        return share is not None and worker in share.holders

    def claim(self, worker: int, order_id: int) -> bool:
        """Return True if a worker's gradient of a share is to be pushed; if False, the worker loses the order."""
        if order_id in self._acknowledged.get(worker, ()):
            return True
        share = self._scheduler.shares.get(order_id)
        if share is None or worker not in share.holders:
            return False
        if share.claimed_by not in (None, worker):
            share.holders.remove(worker)
            self.progress.dropped_copies += 1
            return False
        share.claimed_by = worker
        return True

    def acknowledge(
        self,
        worker: int,
        order_id: int,
        loss_sum: float,
        *,
        read_version: int,
        write_version: int | None = None,
        took_s: float | None = None,
    ) -> Ack:
        """Record that all shards have applied a worker's share.

        Args:
            worker: holder of the claim.
            order_id: id of the share's order.
            loss_sum: the share's part of the batch's mean loss, as `Network.backward` returns it.
            read_version: number of updates in the parameters that the gradient was computed from.
            write_version: number of updates in the parameters when the gradient was applied. Default: `step - 1` where
                a batch is an update, the pushes acknowledged so far where a push is.
            took_s: seconds since the worker was given the share; None: unknown.
        """
        if order_id in self._acknowledged.get(worker, ()):
            return Ack(counts=True)
        share = self._scheduler.shares.get(order_id)
        if share is None or worker not in share.holders or share.claimed_by not in (None, worker):
            return Ack(counts=False)
        self._scheduler.settle(worker, share)
        if write_version is None:
            write_version = self.progress.num_pushes if self.settings.bound is None else share.order.step - 1
        dropped = tuple(holder for holder in share.holders if holder != worker)
        self.progress.dropped_copies += len(dropped)
        if took_s is not None:
            self._scheduler.speeds.note(worker, share.order.num_samples, took_s)
        done = self.progress.add(worker, share.order, loss_sum, max(0, write_version - read_version))
        known = self._acknowledged.setdefault(worker, [])
        known.append(order_id)
        del known[: -self.settings.lookahead]
        return Ack(True, done, dropped)

    def validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        """Record that a part of the validation is done.

        Args:
            worker: holder of the order.
            order_id: id of the part's order.
            sums: loss and metrics, each summed over the samples of the part; empty if it has no samples.

        Returns:
            The means over all samples if this was the last missing part, else None. A caller that ends the run because
                of them calls `request_stop` before anything else.
        """
        return self._barrier.validated(worker, order_id, sums)

    def deposited(self, worker: int, order_id: int) -> bool:
        """Record that the servers have a worker's deposit; return False if the order is not, or no longer, the
        worker's.
        """
        return self._barrier.deposited(worker, order_id)

    def saved(self, worker: int, order_id: int) -> bool:
        """Record that the checkpoint is written; return False if the order is not, or no longer, the worker's."""
        return self._barrier.saved(worker, order_id)

    # -- the end of the run ------------------------------------------------------------------------------------------

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """End the run with a checkpoint, after the batches that have begun. The first request counts.

        Args:
            reason: reason that `Finish` carries: `until`, `time_limit_s` or `interrupted`.
            validate: True to validate before the checkpoint, as at the end of a whole run; for a time limit, not for an
                interrupt.
        """
        self._barrier.request_stop(reason, self._scheduler.begun, validate=validate)

    @property
    def ended(self) -> Finish | None:
        """The end of the run once everything due has been done, else None."""
        step = self._scheduler.begun
        is_over = not self._scheduler.shares and self._barrier.due_after(step) == "end"
        return self._barrier.finish() if is_over else None

    @property
    def at_barrier(self) -> bool:
        """True if all that has begun is done, and something is due before more may begin."""
        return not self._scheduler.shares and self._barrier.due_after(self._scheduler.begun) is not None

    @property
    def step(self) -> int:
        """Number of complete steps."""
        return self.progress.step

    @property
    def begun_step(self) -> int:
        """Last step of which a share was handed out."""
        return self._scheduler.begun

    @property
    def num_shares(self) -> int:
        """Number of shares that the next batch is cut into."""
        return self._scheduler.num_shares

    @property
    def settled(self) -> int:
        """Order id below which all shares are done."""
        return self._scheduler.settled

    @property
    def validation(self) -> dict[str, float] | None:
        """Means of the last validation."""
        return self._barrier.validation

    @property
    def best(self) -> dict[str, Any] | None:
        """Best checkpoint so far, as `Best.after` returns it."""
        best = self._barrier.best
        return None if best is None else dict(best)

    # -- to JSON and back --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the whole state, as JSON values."""
        state: dict[str, Any] = to_json(self)
        return state

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Coordinator:
        """Return the coordinator that `to_json` described; the same inputs give the same outputs."""
        return from_json(Coordinator, value)

    def _check(self, worker: int) -> None:
        if worker not in self._scheduler.clocks:
            raise NotJoinedError(f"worker {worker} has not joined, or was given up; the workers are {self.workers}")
