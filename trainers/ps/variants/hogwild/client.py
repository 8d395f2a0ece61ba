"""A worker's connection to the lead server where values are not sent: orders ahead of need, many reports at a time."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.trainers.ps.protocol.assignments import Compute, Order, Wait
from orchestray.trainers.ps.protocol.messages import Asked
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import Report, Request
from orchestray.trainers.ps.protocol.settings import MAX_AHEAD
from orchestray.trainers.ps.worker.client import ShardClient

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel

_AHEAD_S = 0.3
"""Seconds of work for which a worker holds orders, so that short shares need a message only now and then."""


class HogwildClient(ShardClient):
    """A client with a request in progress while the worker computes what it holds; the worker waits only after a
    barrier.
    """

    def __init__(self, channels: Sequence[Channel], partition: Partition, worker: int, values: Tensor) -> None:
        super().__init__(channels, partition, worker, values)
        self._queue: deque[Order] = deque()
        self._asked: Asked | None = None
        self._reports: list[Report] = []
        self._filled = 0
        """Number of orders held when it last got some."""
        self._share_s = 0.0
        """Mean seconds per share, approximately."""

    def take(self) -> Order:
        """Return the next order, once there is one."""
        while True:
            if self._asked is not None and (self._asked.done() or not self._queue):
                self._receive(self._asked)
            if self._queue:
                break
            if self._asked is None:
                self._ask(wait=True)
        order = self._queue.popleft()
        # Half of what it got, not of what it wanted: near a barrier it gets fewer, and would ask at every share.
        if isinstance(order, Compute) and self._asked is None and 2 * len(self._queue) < min(self._ahead, self._filled):
            self._ask(wait=False)
        return order

    def upcoming(self, number: int) -> list[Compute]:
        """Return up to `number` of the shares that this worker holds and will take next."""
        return [order for order in islice(self._queue, number) if isinstance(order, Compute)]

    def report(self, order: Compute, loss_sum: float, read_version: int, write_version: int, took_s: float) -> None:
        """Record a share that is done; the report goes to the lead with the next request.

        Args:
            order: order of the share.
            loss_sum: the share's part of the batch's mean loss.
            read_version: number of updates in the parameters that the gradient was computed from.
            write_version: number of updates in the parameters when it was applied.
            took_s: seconds that the share took.
        """
        self._reports.append(Report(order.order_id, loss_sum, read_version, write_version))
        self._share_s = took_s if self._share_s == 0.0 else 0.8 * self._share_s + 0.2 * took_s

    def flush_reports(self) -> Mapping[str, Any]:
        """Report what is done, without a request for orders; return the lead's state of the run."""
        answer = self._ask_lead(Request(acknowledge=self._acknowledged(), run_state=True))
        run_state: Mapping[str, Any] = json.loads(answer.run_state or "{}")
        return run_state

    @property
    def _ahead(self) -> int:
        """Number of orders to hold."""
        if self._share_s == 0.0:
            return 2
        return max(2, min(MAX_AHEAD, 1 + math.ceil(_AHEAD_S / self._share_s)))

    def _ask(self, *, wait: bool) -> None:
        acknowledged = self._acknowledged()
        more = max(0, self._ahead - len(self._queue) - 1)
        self._asked = self._links[0].ask(Request(acknowledge=acknowledged, next=self._asking(wait, more=more)))

    def _acknowledged(self) -> tuple[Report, ...]:
        reports, self._reports = self._reports, []
        self._drop([report.order_id for report in reports])
        return tuple(reports)

    def _receive(self, asked: Asked) -> None:
        (answer,) = self._all([asked])
        self._asked = None
        order = self._received(answer.order)
        if isinstance(order, Wait):
            return
        self.holding += [following.order_id for following in answer.more]
        self._queue += [order, *answer.more]
        self._filled = len(self._queue)
