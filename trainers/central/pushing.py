"""When a worker sends what it has computed: at once, or several shares together, or while it computes the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.trainers.central.buffers import BufferPush
    from orchestray.trainers.central.client import PushHandle
    from orchestray.trainers.central.orders import Compute, Order
    from orchestray.trainers.central.worker import CentralWorker


@dataclass(frozen=True)
class Computed:
    """A share whose gradient lies in the worker's flat one."""

    order: Compute
    loss_sum: float
    unused: list[str]
    buffers: BufferPush | None
    versions: list[int]
    """Of the parameters it was computed with, by shard."""


class Pusher(Protocol):
    """One way of sending."""

    wants_parameters: bool
    """Whether the next share is to be computed with fresh parameters, which the worker has to ask for."""

    def push(self, computed: Computed) -> list[Order]:
        """Send the share, now or later; returns orders that came with the answers."""

    def settle(self) -> list[Order]:
        """Send what is left, and return when all of it is acknowledged; returns orders that came with the answers."""


class PushesEach:
    """Each share at once; where one server holds everything, one round trip brings order and parameters back too."""

    def __init__(self, worker: CentralWorker) -> None:
        self._worker = worker
        self._together = worker.central.shards == 1
        self.wants_parameters = False

    def push(self, computed: Computed) -> list[Order]:
        worker = self._worker
        shorter = worker.shorter()
        done = worker.client.push(
            [computed.order],
            worker.contribution(computed) if shorter is None else shorter,
            loss_sums=[computed.loss_sum],
            unused=computed.unused,
            buffers=computed.buffers,
            pull_into=worker.client.home if self._together else None,
            next_order=True,
        )
        if self._together:
            worker.pulled()
        else:
            self.wants_parameters = worker.central.consistency == "asynchronous"
        return [] if done.order is None else [done.order]

    def settle(self) -> list[Order]:
        return []


class PushesLater:
    """The sum of `push_every` shares at a time; with `overlap` on its way while the next one is computed.

    Between two fetches a worker under plain SGD moves its own parameters by its own gradients (Dean et al. 2012,
    algorithm 1); other optimizers keep their state on the servers, and it goes on with the parameters it has. Where
    rates are decoupled it moves them by its own steps, up to its next push, and then fetches.
    """

    def __init__(self, worker: CentralWorker) -> None:
        central = worker.central
        self.wants_parameters = False
        self._worker = worker
        self._push_every, self._fetch_every, self._overlap = central.push_every, central.fetch_every, central.overlap
        optimizer = worker.settings.optimizer
        self._decoupled = central.decouples_rates
        self._moves = central.fetch_every > 1 and optimizer["type"] == "sgd" and not optimizer.get("momentum")
        self._collected: list[Computed] = []
        self._sending = worker.take(worker.flat.values)
        self._sum = None if self._push_every == 1 else worker.take(worker.flat.values).zero_()
        """None: what is pushed is no sum, and is sent from where it was made."""
        self._flight: PushHandle | None = None
        self._in_flight: list[Computed] = []
        self._since_fetch = 0
        self._to_be_alone: set[int] = set()
        """Shares some servers have already, as parts of a sum."""

    @torch.no_grad()
    def push(self, computed: Computed) -> list[Order]:
        gradient = self._worker.contribution(computed)
        if computed.order.order_id in self._to_be_alone:
            self._to_be_alone.remove(computed.order.order_id)
            orders = self.settle()
            self._collect(computed, gradient)
            return orders + self.settle()
        self._collect(computed, gradient)
        self._since_fetch += 1
        if self._since_fetch >= self._fetch_every:
            self._since_fetch, self.wants_parameters = 0, True
        elif self._decoupled:
            self._worker.flat.values.add_(gradient)
        elif self._moves:
            self._worker.step_locally(gradient, computed.order.step)
        if len(self._collected) < self._push_every:
            return []
        return self._send()

    def settle(self) -> list[Order]:
        orders = self._send() if self._collected else []
        return orders + self._land()

    def _collect(self, computed: Computed, gradient: Tensor) -> None:
        if self._sum is not None:
            self._sum.add_(gradient)
        self._collected.append(computed)

    def _send(self) -> list[Order]:
        again = self._land()  # its memory is needed
        if self._decoupled:
            self._since_fetch, self.wants_parameters = 0, True
        collected, self._collected = self._collected, []
        if self._sum is None:
            self._sending = self._worker.flat.hand_over(self._sending)
        else:
            self._sum, self._sending = self._sending, self._sum
            self._sum.zero_()
        oldest = [min(versions) for versions in zip(*(one.versions for one in collected), strict=True)]
        self._in_flight = collected
        shorter = self._worker.shorter(self._sending)
        self._flight = self._worker.client.start_push(
            [one.order for one in collected],
            self._sending if shorter is None else shorter,
            loss_sums=[one.loss_sum for one in collected],
            unused=_unused_by_all(collected),
            buffers=_added_up(collected),
            versions=oldest,
        )
        return again if self._overlap else again + self._land()

    def _land(self) -> list[Order]:
        """Wait for the push under way; returns the shares that have to be computed again, each alone."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        self._to_be_alone |= set(flight.wait().recompute)
        return [one.order for one in self._in_flight if one.order.order_id in self._to_be_alone]


def _unused_by_all(collected: Sequence[Computed]) -> list[str]:
    unused = set(collected[0].unused)
    for one in collected[1:]:
        unused &= set(one.unused)
    return sorted(unused)


def _added_up(collected: Sequence[Computed]) -> BufferPush | None:
    total: BufferPush | None = None
    for one in collected:
        if one.buffers is not None:
            total = one.buffers if total is None else total + one.buffers
    return total
