"""Which share goes to whom: the shares that are not done yet, and what each worker may take of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestray.trainers.central.orders import Compute, order_from_json, order_to_json
from orchestray.trainers.central.plan import LedgerSettings
from orchestray.trainers.central.speeds import Speeds

_Piece = tuple[int, int]


@dataclass
class Share:
    """A share of a batch that has begun, until all shards have taken its gradient in."""

    order: Compute
    holders: list[int] = field(default_factory=list)
    """Workers that compute it; the first had it first."""
    claimed_by: int | None = None
    """The holder whose gradient goes to the shards."""
    returned: bool = False
    """Whether somebody was lost over it."""
    owner: int | None = None
    """The worker whose speed it is cut for; None: it is for anybody, or that worker is lost."""


class Dealer:
    """The shares under way, in the global order, and how far each worker is.

    In a synchronous or stale run each worker takes one share of a batch (its clock is the last batch it took one of),
    more only if there are fewer workers than shares; with `one_share_each` only if there are to be fewer. In an
    asynchronous one it takes the next share there is.

    With `balance: speed` that one share is cut for it, of the size that has all of them take the same time (`speeds`).
    Who would have to wait for a worker that is behind computes what that one has been given and has not begun.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self.num_shares = settings.num_shares
        """Into how many the next batch is cut."""
        self.begun = settings.start_step
        """The last batch of which a share was handed out."""
        self.shares: dict[int, Share] = {}
        """By the id of their order, which rises."""
        self.clocks: dict[int, int] = {}
        """Of the workers that are there."""
        self.speeds = Speeds()
        """Of the workers, as far as they have been timed."""
        self._copying: set[int] = set()
        """Workers that were given a copy and have not asked for more since."""
        self._answered: set[int] = set()
        """With `one_share_each`: workers whose gradient of the last batch that was begun counts."""
        self._next_id = 0

    @property
    def settled(self) -> int:
        """All orders with a smaller id are done."""
        return next(iter(self.shares), self._next_id)

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, worker: int, completed: int) -> None:
        self.clocks[worker] = completed

    def leave(self, worker: int) -> None:
        self.clocks.pop(worker, None)
        self._copying.discard(worker)
        self.speeds.forget(worker)
        for share in self.shares.values():
            if share.owner == worker:
                share.owner, share.returned = None, share.returned or not share.holders
        for share in self.held(worker):
            share.holders.remove(worker)
            share.claimed_by = None if share.claimed_by == worker else share.claimed_by
            share.returned = share.returned or not share.holders

    def held(self, worker: int) -> list[Share]:
        """What a worker computes."""
        return [share for share in self.shares.values() if worker in share.holders]

    def settle(self, worker: int, share: Share) -> None:
        """All shards have taken in a worker's gradient of a share."""
        del self.shares[share.order.order_id]
        if self._settings.one_share_each:
            self._answered.add(worker)

    # -- handing out -------------------------------------------------------------------------------------------------

    def take(self, worker: int, completed: int, may_begin: bool) -> Compute | None:
        """The next share for a worker to compute; None: there is none that it may begin now.

        Args:
            worker: that asks.
            completed: batches up to which all are done.
            may_begin: whether a share of the batch after the last one begun may be handed out.
        """
        self._copying.discard(worker)
        share = self._of_begun(worker)
        if share is None and may_begin and self._may_run_ahead(completed):
            share = self._begin(worker)
        if share is None and self._settings.balance == "speed":
            share = self._of_who_is_behind(worker)
        return None if share is None else self._hand(share, worker, completed)

    def copy(self, worker: int, completed: int) -> Compute | None:
        """A share that somebody else computes, the oldest of those with the fewest copies, for a worker that has none.

        At most `backup_workers` are busy with copies, also with those that nobody needs any more: a worker that would
        be free for the next batch shall not be caught in a copy of this one.
        """
        if len(self._copying) >= self._settings.backup_workers:
            return None
        others = [share for share in self._open(claimed=False) if share.holders and worker not in share.holders]
        if not others or worker in self._answered:
            return None
        self._copying.add(worker)
        share = min(others, key=lambda share: (len(share.holders), share.order.order_id))
        return self._hand(share, worker, completed)

    def again(self, worker: int, share: Share, completed: int) -> Compute:
        """The order of a share as a worker holds it."""
        version = completed if self._settings.bound is not None else 0
        order, copy = share.order, share.holders != [worker]
        same = order.min_version == version and order.copy == copy
        return order if same else replace(order, min_version=version, copy=copy)

    def _hand(self, share: Share, worker: int, completed: int) -> Compute:
        share.holders.append(worker)
        return self.again(worker, share, completed)

    def _open(self, *, claimed: bool) -> Iterator[Share]:
        return (share for share in self.shares.values() if (share.claimed_by is not None) == claimed)

    def _may_run_ahead(self, completed: int) -> bool:
        bound = self._settings.bound
        return bound is None or self.begun - completed <= bound

    def _of_begun(self, worker: int) -> Share | None:
        free = [share for share in self.shares.values() if not share.holders]
        if self._settings.one_share_each:
            return self._first_of(free, worker)
        if not free or self._settings.bound is None:
            return free[0] if free else None
        clock = self.clocks[worker]
        for share in free:
            if share.returned:
                return share
        owned = {share.order.step for share in self.shares.values() if share.owner == worker}
        looked_at = set[int]()
        for share in free:
            step = share.order.step
            if share.owner == worker or (share.owner is None and step > clock and step not in owned):
                self.clocks[worker] = max(clock, step)
                return share
            if share.owner is None and step not in looked_at:
                looked_at.add(step)
                if self._is_surplus(step, free):
                    return share
        return None

    def _first_of(self, free: list[Share], worker: int) -> Share | None:
        """The first of them if the worker has no share of its own, or nobody else is to come for it."""
        if not free:
            return None
        num_held = len(self.shares) - len(free)  # each of them by one who gets no other one
        num_absent = max(0, self.num_shares - len(self.clocks))
        num_to_come = sum(one not in self._answered for one in self.clocks) - num_held + num_absent
        is_without = worker not in self._answered and not self.held(worker)
        return free[0] if is_without or len(free) > num_to_come else None

    def _is_surplus(self, step: int, free: list[Share]) -> bool:
        """Whether a batch has more free shares than there are workers that have had none of it."""
        of_step = [share for share in self.shares.values() if share.order.step == step]
        owners = {share.owner for share in of_step}
        takers = sum(clock < step and worker not in owners for worker, clock in self.clocks.items())
        return sum(share.order.step == step and share.owner is None for share in free) > takers

    def _of_who_is_behind(self, worker: int) -> Share | None:
        """The oldest share that is another worker's, who is still busy with one before it, and would be done later."""
        free = [share for share in self.shares.values() if not share.holders and share.owner not in (None, worker)]
        if not free:
            return None
        busy = Counter[int | None]()
        for share in self.shares.values():
            for holder in share.holders:
                busy[holder] += share.order.num_samples
        workers = sorted(self.clocks)
        rates = dict[int | None, float](zip(workers, self.speeds.rates(workers), strict=True))
        for share in free:
            size, ahead = share.order.num_samples, busy[share.owner]
            if ahead and size / rates[worker] <= (ahead + size) / rates[share.owner]:
                return share
        return None

    def _begin(self, worker: int) -> Share | None:
        """Cut the next batch; returns its first share for a worker. None, and nothing done: it would have none."""
        settings, step = self._settings, self.begun + 1
        owners, cut, owed = self._cut(step)
        first = next((index for index, _ in cut if owners[index] == worker), None)
        first = next((index for index, _ in cut if owners[index] is None), None) if first is None else first
        if first is None:
            return None
        self.begun, self.speeds.owed, self.clocks[worker] = step, owed, step
        self._answered.clear()
        epoch, step_in_epoch = divmod(step - 1, settings.steps_per_epoch)
        batch_samples = settings.batch_samples(step)
        found = None
        for share, (index, pieces) in enumerate(cut):
            order = Compute(
                order_id=self.new_id(),
                step=step,
                epoch=epoch,
                step_in_epoch=step_in_epoch,
                share=share,
                num_shares=len(owners),
                pieces=pieces,
                batch_samples=batch_samples,
                num_samples=sum(stop - start for start, stop in pieces),
                num_micro_batches=min(settings.accumulate, batch_samples),
                min_version=0,
            )
            self.shares[order.order_id] = Share(order, owner=owners[index])
            found = self.shares[order.order_id] if index == first else found
        return found

    def _cut(self, step: int) -> tuple[list[int | None], list[tuple[int, tuple[_Piece, ...]]], dict[int, float]]:
        """Whom each share of a batch is for, index and pieces of those that have a sample, and what is `owed` then."""
        settings, workers = self._settings, sorted(self.clocks)
        if settings.balance == "even":
            return [None] * self.num_shares, settings.shares(step, self.num_shares), {}
        num_absent = max(0, self.num_shares - len(workers))
        sizes, owed = self.speeds.parts(workers, num_absent, settings.batch_samples(step))
        return [*workers, *[None] * num_absent], settings.shares_of(step, sizes), owed

    # -- to JSON and back --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "num_shares": self.num_shares,
            "begun": self.begun,
            "next_id": self._next_id,
            "clocks": [[worker, clock] for worker, clock in self.clocks.items()],
            "answered": sorted(self._answered),
            "copying": sorted(self._copying),
            "speeds": self.speeds.to_json(),
            "shares": [
                {
                    "order": order_to_json(share.order),
                    "holders": list(share.holders),
                    "claimed_by": share.claimed_by,
                    "returned": share.returned,
                    "owner": share.owner,
                }
                for share in self.shares.values()
            ],
        }

    @staticmethod
    def from_json(settings: LedgerSettings, value: Mapping[str, Any]) -> Dealer:
        dealer = Dealer(settings)
        dealer.num_shares, dealer.begun, dealer._next_id = value["num_shares"], value["begun"], value["next_id"]
        dealer.clocks = dict(value["clocks"])
        dealer._answered = set(value["answered"])
        dealer._copying = set(value["copying"])
        dealer.speeds = Speeds.from_json(value["speeds"])
        for told in value["shares"]:
            order = order_from_json(told["order"])
            assert isinstance(order, Compute)
            share = Share(order, list(told["holders"]), told["claimed_by"], told["returned"], told["owner"])
            dealer.shares[order.order_id] = share
        return dealer
