"""A push of a worker to all shards, in progress, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.trainers.ps.protocol.assignments import Order
from orchestray.trainers.ps.protocol.messages import Asked
from orchestray.trainers.ps.protocol.requests import Answer, Report

if TYPE_CHECKING:
    from orchestray.trainers.ps.worker.client import ShardClient


@dataclass(frozen=True)
class PushResult:
    """The outcome of a push on all shards."""

    counts: bool
    """True if its shares are done by it; False: another worker was first, or is computing them."""
    staleness: int
    """Updates between read and write, on the lead."""
    order: Order | None = None
    """The next order, if the push asked for it."""
    recompute: tuple[int, ...] = ()
    """Ids of the orders to compute again and push one by one: some shards already had a part of the pushed sum."""


@dataclass(eq=False)
class PushHandle:
    """A push in progress."""

    client: ShardClient
    asked: Sequence[Asked]
    ids: Sequence[int]
    loss_sums: Sequence[float] | None
    read_version: int
    next_order: bool | None
    pulls: bool
    _result: PushResult | None = None

    def done(self) -> bool:
        """Return True if the shards have answered."""
        return all(one.done() for one in self.asked)

    def wait(self) -> PushResult:
        """Wait until all shards have the gradient and the lead has the acknowledgement. May be called again.

        If the push pulls, the client's `versions` are then those of the pulled parameters.
        """
        if self._result is not None:
            return self._result
        client, ids = self.client, self.ids
        answers = client._all(self.asked)
        if self.pulls:
            client.versions = [answer.version for answer in answers]
            for shard, one in enumerate(self.asked):
                client._adopt(shard, one)
        for shard, each in enumerate(answers):
            if each.is_dropped:
                client.encoder.take_back(shard)
        answer = lead = answers[0]
        is_whole = len(lead.claimed) == len(ids)
        again = len(ids) > 1 and (any(one.missing for one in answers) or (bool(lead.claimed) and not is_whole))
        client._drop([i for i in ids if not again or i not in lead.claimed])
        if len(answers) > 1 and self.loss_sums is not None:
            read, write = self.read_version, self.read_version + lead.staleness
            reports = [Report(i, loss, read, write) for i, loss in zip(ids, self.loss_sums, strict=True)]
            answer = client.acknowledge(reports, self.next_order) if is_whole and not again else Answer()
        order = None if answer.order is None else client._received(answer.order)
        if order is None and self.next_order is not None and not again:
            order = client.next(wait=self.next_order)
        self._result = PushResult(answer.counts, lead.staleness, order, lead.claimed if again else ())
        return self._result
