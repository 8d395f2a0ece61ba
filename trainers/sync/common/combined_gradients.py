"""A base of the schemes that combine whole gradients at every step, after the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.trainers.core.exchange import MAX_EXTRAS, LocalTensor, OptimizedTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.sync.common.exact_sum import ExactSums
from orchestray.trainers.sync.common.exchange_base import ExchangeBase


class CombinedGradients(ExchangeBase, ABC):
    """Replicas whose optimizers all get the same gradient, bit for bit; a subclass combines it in `combine`.

    The replicas scale their losses by num_samples / batch_samples, so the batch's gradient is the sum of theirs. One
    small all-reduce before the gradients sends what the loop needs from all replicas: sums of a few numbers, and which
    parameters were used.
    """

    remembers = False
    """True if a gradient may contain what earlier steps did not send. A parameter that was used once then always has a
    gradient, or its residual would be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[TensorSlice] = []
        """Slice of each update. Unlike in `updates`, every replica's slice counts: its residual is its own."""
        self._sums: ExactSums | None = None
        self._slots = torch.empty(0)
        self._step = 0
        self._ever_used: list[bool] = []

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._ever_used = [False] * len(self._parameters)
        if collective.size > 1:
            num_flags = len(self._parameters) + self.num_flags(model)
            self._sums = ExactSums(num_flags, MAX_EXTRAS, collective.rank, collective.size)
            self._slots = torch.zeros(self._sums.num_slots(torch.float64), dtype=torch.float64)
            self._sums.use(self._slots)
            self.prepare(model)

    def _hold(
        self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None
    ) -> dict[str, LocalTensor]:
        own = super()._hold(model, collective, pieces)
        self._pieces = [own[update.name].piece for update in self._updates]
        return own

    def detach(self) -> None:
        super().detach()
        self._sums = None

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._step = step

    @torch.no_grad()
    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        sums = self._sums
        if sums is None:
            return self._alone(extras)
        collective = self.joined()
        gradients = [parameter.grad for parameter in self._parameters]
        sums.write([*(gradient is not None for gradient in gradients), *self.flags()], extras)
        collective.all_reduce(self._slots)
        anywhere, totals = sums.read()
        used = anywhere[: len(gradients)]
        self._ever_used = [now or before for now, before in zip(used, self._ever_used, strict=True)]
        if self.remembers:
            used = self._ever_used
        whole = [
            torch.zeros_like(parameter) if gradient is None else dense(gradient)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        sent_before = collective.own_bytes_sent
        combined = self.combine(whole, anywhere[len(gradients) :])
        dense_bytes = sum(ring_bytes(parameter, collective.size) for parameter in self._parameters)
        self.bytes_saved += dense_bytes - (collective.own_bytes_sent - sent_before)
        for parameter, gradient, is_used in zip(self._parameters, combined, used, strict=True):
            parameter.grad = gradient if is_used else None
        return totals[: len(extras)]

    # -- overridden by a scheme ----------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """Set up the scheme; called at the end of `attach` if there is more than one replica."""
        return

    def num_flags(self, model: nn.Module) -> int:
        """Return the number of the scheme's own flags, which are sent along."""
        return 0

    def flags(self) -> list[bool]:
        """Return this step's flags, before anything is sent."""
        return []

    @abstractmethod
    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        """Return the optimizers' gradients, the same bits on every replica. All replicas, at least two, call this.

        Args:
            gradients: this replica's gradients, one a parameter; zeros if it has none.
            flags: for each of the scheme's flags, True if any replica had set it.

        Raises:
            PeerLostError: another replica is gone.
        """

    # -- the rest ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, LocalTensor]:
        """Return `kept`, a tensor of each parameter's shape and slice, and which
        parameters were used; empty without a memory.
        """
        if not self.remembers or self._sums is None:
            return {}
        held: dict[str, LocalTensor] = {}
        for kind, tensors in self.kept().items():
            for update, piece, tensor in zip(self._updates, self._pieces, tensors, strict=True):
                if tensor is None:
                    continue
                name = f"{kind}.{update.name}"
                if tensor.shape != update.tensor.shape:
                    piece = TensorSlice.whole(name, tensor.shape, is_counted=piece.is_counted)
                held[name] = LocalTensor(tensor, piece)
        for update, used in zip(self._updates, self._ever_used, strict=True):
            name = f"used.{update.name}"
            held[name] = LocalTensor(torch.tensor(float(used)), TensorSlice.whole(name, ()))
        return held

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.remembers or self._sums is None:
            return
        self._ever_used = [bool(tensors.get(f"used.{update.name}", True)) for update in self._updates]
        self.keep({kind: [tensors.get(f"{kind}.{update.name}") for update in self._updates] for kind in self.kept()})

    def kept(self) -> dict[str, list[Tensor | None]]:
        """Return what is kept from one step to the next, by kind: one tensor for each parameter, in order, or None.

        A tensor has the parameter's shape. It may have another shape if it is a number or the parameter is whole here.
        """
        return {}

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Restore what `kept` returned, here or on a worker that held the same parts of parameters."""
        return


def units_of(updates: Sequence[OptimizedTensor]) -> list[list[int]]:
    """Return the indices of the gradients that may be treated as one vector: those of partial tensors, and of whole
    ones.

    If layers are split over a tensor group, all its workers hold the whole tensors and must compute the same bits of
    them. So a computation on a unit of whole tensors must depend on nothing that differs between the workers.
    """
    whole = [index for index, update in enumerate(updates) if update.piece.is_whole]
    parts = [index for index, update in enumerate(updates) if not update.piece.is_whole]
    return [unit for unit in (parts, whole) if unit]


def typed(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Convert the tensors to the types of `like`."""
    return [tensor.to(template.dtype) for tensor, template in zip(tensors, like, strict=True)]
