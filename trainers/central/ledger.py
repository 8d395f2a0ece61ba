"""Who computes which samples in a centralised run, whose push is applied, and when everybody must stop.

The lead server holds a `Ledger`. It is a state machine without time, chance, or I/O: its inputs are method calls, its
whole state goes to JSON and back, and the same inputs then give the same outputs. So a backup of the lead that is told
the inputs in their order is the same ledger, and a checkpoint can hold it.

How a share's gradient comes into the parameters, exactly once whatever is lost on the way:

1.  `next` hands a worker a `Compute`. Its `order_id` names the share, whoever computes it and however often it is
    handed out; it is the key by which every shard knows what it has taken in.
2.  The worker pulls parameters of at least `min_version` from every shard, and computes.
3.  `claim(worker, order_id)` BEFORE any shard takes the gradient in. One worker at a time has the claim. Who is refused
    throws its gradient away: a copy was first, or the lead has given the worker up.
4.  The worker pushes its slices to all shards, in any order. A shard takes a slice in unless it has one of this
    `order_id`, and says so in both cases: a repeated push is as good as the first.
5.  `acknowledge(worker, order_id, ...)` once ALL shards have answered. From here on the share is done.

Only copies need step 3: without `backup_workers` a share has one holder, whose acknowledgement implies the claim.

A worker that is lost (`leave`) before 3 or after 5 leaves nothing behind but the share to hand out again, or nothing.
Lost between 3 and 5, it has pushed to some shards and not to others: the claim goes back with the share, the next
worker computes the same samples and pushes to all shards, and only those that lack the share take it in: no shard
lacks it, none has it twice. Its own late slices may still arrive; they are duplicates, or make the others so.

A shard that updates once a batch (synchronous, stale) keeps what it has been pushed of batch c until it sees that the
ledger knows c to be complete: by the first pull or push of an order whose `min_version` is at least c, or a `Save`,
`Validate` or `Finish` of a later or the same step. So the parameters that batch c was computed from are there until
nobody can be told to compute a share of it again, and a share that is computed twice has the same gradient twice.
An asynchronous shard updates at once; two slices of one share may then be of two gradients, each of that share.

All orders with an id below `settled` are done: a shard may forget their ids and call any push of them a duplicate.

With `balance: speed` shares follow the speeds of the workers (see `speeds`). Time is no business of the ledger's: it is
told with an acknowledgement how long the share took.

Requests may be repeated, as a worker does whose lead was replaced before it answered: a claim that was granted is
granted again, a share that was acknowledged is acknowledged again (with nothing new done), and `next` with the ids the
worker holds hands out again what it does not know of. `Wait` is answered by nobody: hold the request back and call
`next` again after the next input, but for `Wait(drain=True)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from orchestray.trainers.central.accounts import Accounts
from orchestray.trainers.central.barrier import Barrier
from orchestray.trainers.central.dealing import Dealer
from orchestray.trainers.central.orders import LEFT, Ack, Compute, Finish, Order, Wait
from orchestray.trainers.central.plan import LedgerSettings


class Ledger:
    """The state machine; how it is used is in the module's text.

    Workers are numbers. A call about a worker that is not there raises ValueError, except `leave`.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.accounts = Accounts(settings)
        """What is applied; and the statistics: `staleness`, `samples_by_worker`, `dropped_copies`, `num_pushes`."""
        self._dealer = Dealer(settings)
        self._barrier = Barrier(settings)
        self._dismissed: set[int] = set()
        self._acknowledged: dict[int, list[int]] = {}
        """The last orders of each worker that counted, as many as it may ask about again."""

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        """Those that are there, in rising order."""
        return sorted(self._dealer.clocks)

    def join(self, worker: int) -> None:
        """A worker is there; one that was there already has been started anew, and what it held goes back."""
        self.leave(worker)
        self._dealer.join(worker, self.accounts.step)

    def leave(self, worker: int) -> None:
        """A worker is lost: its orders are handed out again, before all others. What it acknowledged stays."""
        self._dealer.leave(worker)
        self._barrier.leave(worker)
        self._acknowledged.pop(worker, None)
        self._dismissed.discard(worker)

    def dismiss(self, worker: int) -> None:
        """A worker, if it is there, is to leave once it has done what it holds: it is told `Finish(LEFT)`."""
        if worker in self._dealer.clocks:
            self._dismissed.add(worker)

    def resize(self, num_shares: int) -> None:
        """Cut batches into another number of shares, from the first batch on that nobody has begun."""
        if num_shares < 1:
            raise ValueError(f"num_shares must be at least 1, got {num_shares}")
        self._dealer.num_shares = num_shares

    # -- what they do ------------------------------------------------------------------------------------------------

    def next(self, worker: int, holding: Collection[int] | None = None) -> Order:
        """What a worker shall do next.

        Args:
            worker: that asks.
            holding: ids of all orders it has and has not reported on; an order that the ledger gave it and that is not
                among them was lost on the way and is given again. None: nothing was lost.
        """
        self._check(worker)
        held = self._dealer.held(worker)
        lost = None if holding is None else self._lost(worker, holding)
        if lost is not None:
            return lost
        if worker in self._dismissed:
            return Wait(drain=True) if held else Finish(LEFT)
        may_begin = self._barrier.is_open_after(self._dealer.begun)
        if len(held) < self.settings.lookahead:
            order = self._dealer.take(worker, self.accounts.step, may_begin)
            if order is None and not held:
                order = self._dealer.copy(worker, self.accounts.step)
            if order is not None:
                return order
        if self._dealer.shares or may_begin:
            return Wait(drain=bool(held))
        return self._barrier.next(worker, self._dealer.begun, self.workers, self._dealer.new_id)

    def next_shares(self, worker: int, number: int) -> list[Compute]:
        """At most so many shares beside those that a worker holds: what `next` gives it one after the other, while that
        is shares that nobody else computes.
        """
        self._check(worker)
        dealer, found = self._dealer, list[Compute]()
        room = self.settings.lookahead - len(dealer.held(worker))
        while len(found) < min(number, room):
            order = dealer.take(worker, self.accounts.step, self._barrier.is_open_after(dealer.begun))
            if order is None:
                break
            found.append(order)
        return found

    def claim(self, worker: int, order_id: int) -> bool:
        """Whether a worker's gradient of a share shall go to the shards; if not, the order is no longer its own."""
        self._check(worker)
        if order_id in self._acknowledged.get(worker, ()):
            return True
        share = self._dealer.shares.get(order_id)
        if share is None or worker not in share.holders:
            return False
        if share.claimed_by not in (None, worker):
            share.holders.remove(worker)
            self.accounts.dropped_copies += 1
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
        """All shards have taken in a share of a worker.

        Args:
            worker: that had the claim.
            order_id: of the share.
            loss_sum: the share's part of the batch's mean loss, as `Network.backward` returns it.
            read_version: updates that the parameters held which the gradient was computed from.
            write_version: updates that they held when it was taken in; default: `step - 1` where a batch is an update,
                the pushes acknowledged so far where a push is.
            took_s: seconds since the worker was given the share; None: nobody knows.
        """
        if order_id in self._acknowledged.get(worker, ()):
            return Ack(counts=True)
        share = self._dealer.shares.get(order_id)
        if share is None or worker not in share.holders or share.claimed_by not in (None, worker):
            return Ack(counts=False)
        self._dealer.settle(worker, share)
        if write_version is None:
            write_version = self.accounts.num_pushes if self.settings.bound is None else share.order.step - 1
        dropped = tuple(holder for holder in share.holders if holder != worker)
        self.accounts.dropped_copies += len(dropped)
        if took_s is not None:
            self._dealer.speeds.note(worker, share.order.num_samples, took_s)
        done = self.accounts.add(worker, share.order, loss_sum, max(0, write_version - read_version))
        known = self._acknowledged.setdefault(worker, [])
        known.append(order_id)
        del known[: -self.settings.lookahead]
        return Ack(True, done, dropped)

    def validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        """A part of the validation is done.

        Args:
            worker: that had the order.
            order_id: of the part.
            sums: loss and metrics, each summed over the samples of the part; empty if it has none.

        Returns:
            The means over all samples when it was the last part that was missing; else None. Whoever finds in them that
            the run is to end calls `request_stop` before anything else.
        """
        return self._barrier.validated(worker, order_id, sums)

    def deposited(self, worker: int, order_id: int) -> bool:
        """The servers have what a worker keeps; False: the order is not, or no longer, the worker's."""
        return self._barrier.deposited(worker, order_id)

    def saved(self, worker: int, order_id: int) -> bool:
        """The checkpoint is written; False: the order is not, or no longer, the worker's."""
        return self._barrier.saved(worker, order_id)

    # -- how it ends -------------------------------------------------------------------------------------------------

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """End after the batches that have begun, with a checkpoint. The first request counts.

        Args:
            reason: what `Finish` says: `until`, `time_limit_s`, `interrupted`.
            validate: before the checkpoint, as at the end of a whole run; a time limit does, an interrupt does not.
        """
        self._barrier.request_stop(reason, self._dealer.begun, validate=validate)

    @property
    def ended(self) -> Finish | None:
        """The end, once everything due has been done."""
        if self._dealer.shares or self._barrier.is_open_after(self._dealer.begun):
            return None
        return self._barrier.finish(self._dealer.begun)

    @property
    def at_barrier(self) -> bool:
        """Whether all that was begun is done, and something is due before more may begin."""
        return not self._dealer.shares and not self._barrier.is_open_after(self._dealer.begun)

    @property
    def step(self) -> int:
        """Complete steps."""
        return self.accounts.step

    @property
    def begun_step(self) -> int:
        """The last step of which a share was handed out."""
        return self._dealer.begun

    @property
    def num_shares(self) -> int:
        """Into how many the next batch is cut."""
        return self._dealer.num_shares

    @property
    def settled(self) -> int:
        """All shares whose order has a smaller id are done."""
        return self._dealer.settled

    @property
    def validation(self) -> dict[str, float] | None:
        """What the last validation said."""
        return self._barrier.validation

    # -- to JSON and back --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        return {
            "settings": asdict(self.settings),
            "accounts": self.accounts.to_json(),
            "dealer": self._dealer.to_json(),
            "barrier": self._barrier.to_json(),
            "dismissed": sorted(self._dismissed),
            "acknowledged": [[worker, list(known)] for worker, known in self._acknowledged.items()],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_json` told: the same inputs give the same outputs."""
        ledger = Ledger(LedgerSettings(**value["settings"]))
        ledger.accounts = Accounts.from_json(ledger.settings, value["accounts"])
        ledger._dealer = Dealer.from_json(ledger.settings, value["dealer"])
        ledger._barrier = Barrier.from_json(ledger.settings, value["barrier"])
        ledger._dismissed = set(value["dismissed"])
        ledger._acknowledged = {worker: list(known) for worker, known in value["acknowledged"]}
        return ledger

    def _lost(self, worker: int, holding: Collection[int]) -> Order | None:
        for share in self._dealer.held(worker):
            if share.order.order_id not in holding:
                return self._dealer.again(worker, share, self.accounts.step)
        return self._barrier.lost(worker, holding)

    def _check(self, worker: int) -> None:
        if worker not in self._dealer.clocks:
            raise ValueError(f"worker {worker} has not joined, or was given up; the workers are {self.workers}")
