"""The centre of elastic averaging: kept by all replicas alike, or by the first one alone and served to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.trainers.sync.local.answering import Links, PulledValues, pulled


class Pull(Protocol):
    """A pull of a replica in flight."""

    def wait(self) -> list[Tensor]:
        """Return what the replica must subtract from its parameters: alpha (x - centre), by which the centre has moved.

        Raises:
            PeerLostError: another replica is gone.
        """


class Centre(ABC):
    """Flat tensors that replicas pull at.

    Args:
        start: values it begins with, the same on every replica; the centre takes them over.
        alpha: fraction of the distance that is moved.
        collective: the replicas. All make their end at the same time.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective) -> None:
        self._values = start
        self._alpha = alpha
        self._collective = collective
        self.saved_bytes = 0
        """Bytes saved by compression: this replica's part of what all have saved together."""

    @property
    def asked_bytes(self) -> int:
        """Bytes that this replica's pulls have sent outside the collective, both ways; known when a pull is done."""
        return 0

    @abstractmethod
    def meet(self, position: list[Tensor], step: int) -> Pull:
        """Start a pull from `position`, which the centre takes over, in this step."""

    def values(self) -> list[Tensor]:
        """Return copies of the current values, the same bits everywhere. All
        replicas call this, with no pull in flight.
        """
        return [value.clone() for value in self._values]

    def values_here(self) -> list[Tensor]:
        """Return the centre's own memory, on the first replica."""
        return self._values

    def close(self) -> None:
        """Close the centre's own connections and threads."""
        return


class SharedCentre(Centre):
    """A centre kept by every replica, and moved by the sum of all pulls: equations 5 and 6 of the paper."""

    def meet(self, position: list[Tensor], step: int) -> Pull:
        pulls = [pulled(mine, value, self._alpha) for mine, value in zip(position, self._values, strict=True)]
        sums = [pull.clone() for pull in pulls]
        return _Together(self._values, pulls, sums, [self._collective.start_all_reduce(each) for each in sums])


class _Together:
    def __init__(self, values: list[Tensor], pulls: list[Tensor], sums: list[Tensor], pending: list[Pending]) -> None:
        self._values, self._pulls, self._sums, self._pending = values, pulls, sums, pending

    def wait(self) -> list[Tensor]:
        for pending in self._pending:
            pending.wait()
        torch._foreach_add_(self._values, self._sums)
        return self._pulls


class ServedCentre(Centre):
    """A centre kept by the first replica, to which each of the others has a channel: no pull waits for another replica.

    Algorithm 1 of the paper: the centre moves by one replica's pull at a time.
    """

    def __init__(
        self, start: list[Tensor], alpha: float, collective: Collective, service: PulledValues | None = None
    ) -> None:
        super().__init__(start, alpha, collective)
        self._service = service or PulledValues(self._values, alpha)
        self._links = Links(collective, self._service, ((rank, 0) for rank in range(1, collective.size)))

    def meet(self, position: list[Tensor], step: int) -> Pull:
        if self._collective.rank == 0:
            return _Done(self._service.pull(position))
        return self._links.ask(0, position)

    @property
    def asked_bytes(self) -> int:
        return self._links.asked_bytes

    def values(self) -> list[Tensor]:
        values = self._service.values()
        for value in values:
            self._collective.broadcast(value, 0)
        return values

    def close(self) -> None:
        self._links.close()


class _Done:
    def __init__(self, pulls: list[Tensor]) -> None:
        self._pulls = pulls

    def wait(self) -> list[Tensor]:
        return self._pulls
