"""A base of the schemes in which each replica updates its own model, and the replicas agree now and then."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.exchange_base import ExchangeBase
from orchestray.trainers.sync.common.local_tensors import updated_whole


class LocalUpdates(ExchangeBase, ABC):
    """Replicas whose parameters differ between two meetings.

    Each replica takes the gradient of its share as if the share were the batch: the loop weighs a micro-batch by
    num_samples / batch_samples, and `finish` multiplies by the number of replicas. So the mean of the replicas' moves
    is the move of one process on the whole batch, for any sizes of the shares.

    A subclass decides in `after_step` when the replicas meet and what becomes of their parameters. Its own state
    besides the parameters is in `state`.
    """

    diverges = True

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, LocalTensor] = {}
        self._shared: list[Tensor] = []
        self._statistics: list[int] = []
        """Indices of the shared tensors that are not parameters but running statistics of batch normalisation and the
        like. They are sent uncompressed where moves are compressed. A statistic is not a sum of moves: it goes part of
        the way to the last measurement. A residual that comes late would overshoot, a variance to below zero.
        """

    def _hold(
        self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None
    ) -> dict[str, LocalTensor]:
        self._own = super()._hold(model, collective, pieces)
        self._updates = updated_whole(model, self._own)
        shared = {name: held.tensor for name, held in self._own.items() if held.tensor.is_floating_point()}
        self._shared = list(shared.values())
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._statistics = [index for index, name in enumerate(shared) if name not in parameters]
        return self._own

    def own(self) -> dict[str, LocalTensor]:
        return self._own

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        """Return this replica's own extras: nothing is sent."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if gradients and self.shares_batch and self.joined().size > 1:
            torch._foreach_mul_(gradients, float(self.joined().size))
        return [float(extra) for extra in extras]

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Meet the other replicas, if it is time to.

        Raises:
            PeerLostError: another replica is gone.
        """

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Replace the model inside by what the replicas agree on, the same everywhere: here their mean. All call this.

        Raises:
            PeerLostError: another replica is gone.
        """
        before = [tensor.clone() for tensor in self._shared]
        try:
            self.agree()
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._shared, before)

    @torch.no_grad()
    def agree(self) -> None:
        self.take_mean(self._shared)

    @torch.no_grad()
    def take_mean(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor by its mean over the replicas, in place, the same bits on each of them."""
        collective = self.joined()
        if collective.size == 1 or not tensors:
            return
        flat = FlatTensors(tensors)
        means = flat.pack()
        for mean in means:
            collective.all_reduce(mean)
            mean /= collective.size
        flat.unpack(means)
