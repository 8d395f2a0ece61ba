"""The ways in which a worker pushes its shares: at once, several together, or while it computes the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.trainers.ps.protocol.assignments import Compute, Order
    from orchestray.trainers.ps.protocol.buffers import BufferPush
    from orchestray.trainers.ps.worker.push_handle import PushHandle
    from orchestray.trainers.ps.worker.worker import CentralWorker


@dataclass(frozen=True)
class Computed:
    """A share whose gradient is in the worker's flat gradient."""

    order: Compute
    loss_sum: float
    unused: list[str]
    buffers: BufferPush | None
    measured: Sequence[Tensor]
    """Measurements for the optimizer of each shard; empty: there are none."""
    versions: list[int]
    """Versions of the parameters it was computed with, by shard."""


class Pusher(Protocol):
    """A way of pushing."""

    wants_parameters: bool
    """True if the next share is to be computed with fresh parameters, which the worker has to pull."""

    def push(self, computed: Computed) -> list[Order]:
        """Send the share, now or later; return the orders that came with the answers."""

    def settle(self) -> list[Order]:
        """Send what is left and wait until all of it is acknowledged; return the orders that came with the answers."""


class PushesEach:
    """A pusher that sends each share at once.

    If one server holds everything, the same round trip brings the next order and the parameters back.
    """

    def __init__(self, worker: CentralWorker) -> None:
        self._worker = worker
        central = worker.central
        self._each_is_an_update = not central.updates_are_batches
        # A bound on the staleness holds for parameters that are fetched after the order, which may come later.
        self._together = central.shards == 1 and not (self._each_is_an_update and central.consistency == "stale")
        self.wants_parameters = False
        self._num_pushes = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `pushes`; empty before the first one."""
        return {"pushes": self._num_pushes} if self._num_pushes else {}

    def push(self, computed: Computed) -> list[Order]:
        worker = self._worker
        shorter = worker.shorter()
        self._num_pushes += 1
        done = worker.client.push(
            [computed.order],
            worker.contribution(computed) if shorter is None else shorter,
            loss_sums=[computed.loss_sum],
            unused=computed.unused,
            buffers=computed.buffers,
            measured=computed.measured,
            pull_into=worker.client.home if self._together else None,
            next_order=True,
        )
        if self._together:
            worker.pulled()
        else:
            self.wants_parameters = self._each_is_an_update
        return [] if done.order is None else [done.order]

    def settle(self) -> list[Order]:
        return []


class PushesLater:
    """A pusher of sums of `push_every` shares, with `overlap` while the next share is computed.

    Between two fetches a worker under plain SGD moves its own parameters by its own gradients (Dean et al. 2012,
    algorithm 1). Other optimizers keep their state on the servers, and the worker continues with the parameters it has.
    With decoupled rates it moves them by its own steps up to its next push, and then fetches.
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
        """None: a push is a single gradient, and is sent from where it was made."""
        self._push_in_progress: PushHandle | None = None
        self._being_pushed: list[Computed] = []
        self._since_fetch = 0
        self._to_be_alone: set[int] = set()
        """Shares that some servers already have as parts of a sum."""
        self._most_pushed = self._most_between = 0

    def run_report(self) -> dict[str, int]:
        """Return the most shares of a push and those computed between two fetches; empty before the first push.

        They are `shares_a_push` and `shares_a_fetch`.
        """
        shares = {"shares_a_push": self._most_pushed, "shares_a_fetch": self._most_between}
        return shares if self._most_pushed else {}

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
        self._most_between = max(self._most_between, self._since_fetch)
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
        again = self._land()  # this push needs the memory of the last one
        if self._decoupled:
            self._since_fetch, self.wants_parameters = 0, True
        collected, self._collected = self._collected, []
        self._most_pushed = max(self._most_pushed, len(collected))
        if self._sum is None:
            self._sending = self._worker.flat.hand_over(self._sending)
        else:
            self._sum, self._sending = self._sending, self._sum
            self._sum.zero_()
        oldest = [min(versions) for versions in zip(*(one.versions for one in collected), strict=True)]
        self._being_pushed = collected
        shorter = self._worker.shorter(self._sending)
        self._push_in_progress = self._worker.client.start_push(
            [one.order for one in collected],
            self._sending if shorter is None else shorter,
            loss_sums=[one.loss_sum for one in collected],
            unused=_unused_by_all(collected),
            buffers=_added_up(collected),
            versions=oldest,
        )
        return again if self._overlap else again + self._land()

    def _land(self) -> list[Order]:
        """Wait for the push in progress; return the shares that have to be computed again, each alone."""
        handle, self._push_in_progress = self._push_in_progress, None
        if handle is None:
            return []
        self._to_be_alone |= set(handle.wait().recompute)
        return [one.order for one in self._being_pushed if one.order.order_id in self._to_be_alone]


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
