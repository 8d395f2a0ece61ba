"""The assignment of shares to workers: the shares that are not done yet, and those that each worker may take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.json_state import Numbers
from orchestray.trainers.ps.protocol.load_balancing import Speeds
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings

_Piece = tuple[int, int]


@dataclass
class Share:
    """A share of a batch that has begun, until all shards have taken its gradient in."""

    order: Compute
    holders: list[int] = field(default_factory=list)
    """Workers that compute it, in the order in which they got it."""
    claimed_by: int | None = None
    """The holder whose gradient goes to the shards."""
    returned: bool = False
    """True if a worker was lost that computed it."""
    owner: int | None = None
    """Worker to whose speed its size is fitted; None: any worker may take it, or that worker is lost."""


@dataclass(eq=False)
class ShareScheduler:
    """A scheduler of the shares in progress, in the global order, which knows how far each worker is.

    In a synchronous or stale run each worker takes one share of a batch; its clock is the last batch of which it took
    one. It takes more only if there are fewer workers than shares; with `one_share_each`, only if there will be fewer.
    In an asynchronous run it takes the next free share.

    With `balance: speed` the size of a worker's share is chosen so that all workers take the same time (`speeds`). A
    worker that would have to wait for a slower one computes the share that the slower one has been assigned and has not
    begun.
    """

    settings: CoordinatorSettings
    num_shares: int
    """Number of shares that the next batch is cut into."""
    begun: int
    """Last batch of which a share was handed out."""
    shares: dict[int, Share] = field(default_factory=dict)
    """Shares by the id of their order, in rising order."""
    clocks: dict[int, int] = field(default_factory=dict)
    """Last batch of which each present worker took a share."""
    speeds: Speeds = field(default_factory=Speeds)
    """Speeds of the workers, as far as they have been measured."""
    _copying: Numbers = field(default_factory=set)
    """Workers that were given a copy and have not asked for more since."""
    _answered: Numbers = field(default_factory=set)
    """With `one_share_each`: workers whose gradient of the newest batch has been acknowledged."""
    _next_id: int = 0

    @property
    def settled(self) -> int:
        """Order id below which all orders are done."""
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
        """Return the shares that a worker computes."""
        return [share for share in self.shares.values() if worker in share.holders]

    def settle(self, worker: int, share: Share) -> None:
        """Record that all shards have applied a worker's gradient of a share."""
        del self.shares[share.order.order_id]
        if self.settings.one_share_each:
            self._answered.add(worker)

    # -- handing out -------------------------------------------------------------------------------------------------

    def take(self, worker: int, completed: int, may_begin: bool) -> Compute | None:
        """Return the next share for a worker to compute; None if it may begin none now.

        Args:
            worker: number of the worker that asks.
            completed: last batch up to which all batches are done.
            may_begin: True if a share of the batch after the newest may be handed out.
        """
        self._copying.discard(worker)
        share, bound = self._of_begun(worker), self.settings.bound
        if share is None and may_begin and (bound is None or self.begun - completed <= bound):
            share = self._begin(worker)
        if share is None and self.settings.balance == "speed":
            share = self._of_who_is_behind(worker)
        return None if share is None else self._hand(share, worker, completed)

    def copy(self, worker: int, completed: int) -> Compute | None:
        """Return a copy of a share that another worker computes, for a worker that has none; None if there is none.

        It is the oldest of the shares with the fewest copies. At most `backup_workers` workers are busy with copies,
        including copies that are no longer needed. So a worker that would be free for the next batch is not held up by
        a copy of this one.
        """
        if len(self._copying) >= self.settings.backup_workers:
            return None
        unclaimed = [share for share in self.shares.values() if share.claimed_by is None]
        others = [share for share in unclaimed if share.holders and worker not in share.holders]
        if not others or worker in self._answered:
            return None
        self._copying.add(worker)
        share = min(others, key=lambda share: (len(share.holders), share.order.order_id))
        return self._hand(share, worker, completed)

    def again(self, worker: int, share: Share, completed: int) -> Compute:
        """Return the order of a share as its worker holds it, with the present `min_version`."""
        version = completed if self.settings.bound is not None else 0
        order, copy = share.order, share.holders != [worker]
        same = order.min_version == version and order.copy == copy
        return order if same else replace(order, min_version=version, copy=copy)

    def _hand(self, share: Share, worker: int, completed: int) -> Compute:
        share.holders.append(worker)
        return self.again(worker, share, completed)

    def _of_begun(self, worker: int) -> Share | None:
        free = [share for share in self.shares.values() if not share.holders]
        if self.settings.one_share_each:
            return self._first_of(free, worker)
        if not free or self.settings.bound is None:
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
        """Return the first free share if the worker has no share of its own, or if no other worker will come for it."""
        if not free:
            return None
        num_held = len(self.shares) - len(free)  # each by a worker that gets no other
        num_absent = max(0, self.num_shares - len(self.clocks))
        num_to_come = sum(one not in self._answered for one in self.clocks) - num_held + num_absent
        is_without = worker not in self._answered and not self.held(worker)
        return free[0] if is_without or len(free) > num_to_come else None

    def _is_surplus(self, step: int, free: list[Share]) -> bool:
        """Return True if a batch has more free shares than there are workers without one of it."""
        of_step = [share for share in self.shares.values() if share.order.step == step]
        owners = {share.owner for share in of_step}
        takers = sum(clock < step and worker not in owners for worker, clock in self.clocks.items())
        return sum(share.order.step == step and share.owner is None for share in free) > takers

    def _of_who_is_behind(self, worker: int) -> Share | None:
        """Return the oldest share assigned to another worker that is still busy and would finish it later; None if
        none.
        """
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
        """Cut the next batch and return a worker's first share of it; None, and do nothing, if the worker would get
        none.
        """
        settings, step = self.settings, self.begun + 1
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
        """Cut a batch; return each share's owner, index and pieces of the shares with samples, and the new `owed`."""
        settings, workers = self.settings, sorted(self.clocks)
        if settings.balance == "even":
            return [None] * self.num_shares, settings.shares(step, self.num_shares), {}
        num_absent = max(0, self.num_shares - len(workers))
        sizes, owed = self.speeds.parts(workers, num_absent, settings.batch_samples(step))
        return [*workers, *[None] * num_absent], settings.shares_of(step, sizes), owed
