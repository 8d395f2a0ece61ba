"""A worker's end of the lead server where values are not sent: orders ahead of need, reports many at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.trainers.central.client import ShardClient
from orchestray.trainers.central.link import Asked
from orchestray.trainers.central.orders import Compute, Order, Wait, compute_from_row
from orchestray.trainers.central.partition import Partition
from orchestray.trainers.central.settings import MAX_AHEAD

if TYPE_CHECKING:
    from orchestray.platform.channel.base import Channel

_AHEAD_S = 0.3
"""A worker holds orders for so long: then short shares cost a message only now and then."""


class LedgerClient(ShardClient):
    """A request is under way while the worker computes what it holds: it waits for the first after a barrier alone."""

    def __init__(self, channels: Sequence[Channel], partition: Partition, worker: int, values: Tensor) -> None:
        super().__init__(channels, partition, worker, values)
        self._queue: deque[Order] = deque()
        self._asked: Asked | None = None
        self._reports: list[list[Any]] = []
        self._filled = 0
        """Orders it held when it last got some."""
        self._share_s = 0.0
        """A share takes so long, about."""

    def take(self) -> Order:
        """The next order, once there is one."""
        while True:
            if self._asked is not None and (self._asked.done() or not self._queue):
                self._receive(self._asked)
            if self._queue:
                break
            if self._asked is None:
                self._ask(wait=True)
        order = self._queue.popleft()
        # Half of what there was, not of what it wants: near a barrier it is given less, and would ask at every share.
        if isinstance(order, Compute) and self._asked is None and 2 * len(self._queue) < min(self._ahead, self._filled):
            self._ask(wait=False)
        return order

    def upcoming(self, number: int) -> list[Compute]:
        """At most so many of the shares that this worker holds and will take next."""
        return [order for order in islice(self._queue, number) if isinstance(order, Compute)]

    def report(self, order: Compute, loss_sum: float, read_version: int, write_version: int, took_s: float) -> None:
        """A share is done; the lead is told with the next request."""
        self._reports.append([order.order_id, loss_sum, read_version, write_version])
        self._share_s = took_s if self._share_s == 0.0 else 0.8 * self._share_s + 0.2 * took_s

    def tell(self) -> Mapping[str, Any]:
        """Report what is done, and ask for nothing; returns what the lead says of the run."""
        told = self._one(self._links[0].ask({**self._acknowledgement(), "told": True}))["told"]
        return dict(told)

    @property
    def _ahead(self) -> int:
        """Orders to hold."""
        if self._share_s == 0.0:
            return 2
        return max(2, min(MAX_AHEAD, 1 + math.ceil(_AHEAD_S / self._share_s)))

    def _ask(self, *, wait: bool) -> None:
        request = self._acknowledgement()
        more = max(0, self._ahead - len(self._queue) - 1)
        self._asked = self._links[0].ask({**request, "next": {**self._asking(wait), "more": more}})

    def _acknowledgement(self) -> dict[str, Any]:
        reports, self._reports = self._reports, []
        self._drop([report[0] for report in reports])
        return {"acknowledge": reports} if reports else {}

    def _receive(self, asked: Asked) -> None:
        answer = self._one(asked)
        self._asked = None
        order = self._received(answer["order"])
        if isinstance(order, Wait):
            return
        more = [compute_from_row(row) for row in answer.get("more", ())]
        self.holding += [following.order_id for following in more]
        self._queue += [order, *more]
        self._filled = len(self._queue)
