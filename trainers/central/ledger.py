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

Requests may be repeated, as a worker does whose lead was replaced before it answered: a claim that was granted is
granted again, a share that was acknowledged is acknowledged again (with nothing new done), and `next` with the ids the
worker holds hands out again what it does not know of. `Wait` is answered by nobody: hold the request back and call
`next` again after the next input, but for `Wait(drain=True)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from orchestray.trainers.central.orders import Ack, Order
from orchestray.trainers.central.plan import LedgerSettings


class Ledger:
    """See the module's text."""

    def __init__(self, settings: LedgerSettings) -> None: ...

    def join(self, worker: int) -> None:
        """A worker is there; one that was there already has been started anew, and what it held goes back."""

    def leave(self, worker: int) -> None:
        """A worker is lost: its orders are handed out again, before all others. What it acknowledged stays."""

    def resize(self, num_shares: int) -> None:
        """Cut batches into another number of shares, from the first batch on that nobody has begun."""

    def next(self, worker: int, holding: Collection[int] | None = None) -> Order:
        """What the worker shall do next."""
        raise NotImplementedError

    def claim(self, worker: int, order_id: int) -> bool:
        """Whether the worker's gradient of a share shall be pushed to the shards."""
        raise NotImplementedError

    def acknowledge(
        self, worker: int, order_id: int, loss_sum: float, *, read_version: int = 0, write_version: int | None = None
    ) -> Ack:
        """All shards have taken in a share that the worker had claimed."""
        raise NotImplementedError

    def validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        """A part of the validation is done; returns the means over all samples when it was the last part."""

    def saved(self, worker: int, order_id: int) -> bool:
        """The checkpoint is written; False: the order was not the worker's."""
        raise NotImplementedError

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """End after the batches that have begun."""

    @property
    def settled(self) -> int:
        """All orders with a smaller id are done."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The whole state."""
        raise NotImplementedError

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Ledger:
        raise NotImplementedError
