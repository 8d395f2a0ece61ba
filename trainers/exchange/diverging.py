"""What the schemes have in common in which each replica updates a model of its own, and they agree now and then."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.exchange.defaults import Defaults
from orchestray.trainers.exchange.holdings import held_tensors, updated_whole
from orchestray.trainers.layout.pieces import Piece


class Diverging(Defaults, ABC):
    """Replicas whose parameters differ between two meetings.

    Each replica takes the gradient of its share as if the share were the batch: the loop weighs a micro-batch by
    num_samples / batch_samples, and `finish` multiplies by the number of replicas. So the mean of the replicas' moves
    is the move of one process on the whole batch, whatever the sizes of the shares.

    A subclass says in `after_step` when the replicas meet and what becomes of their parameters, and what it keeps
    beside them in `state`.
    """

    shares_batch = True
    """Whether the replicas share each batch; False: each has batches of its own."""

    def __init__(self) -> None:
        self._collective: Collective | None = None
        self._parameters: list[Tensor] = []
        self._own: dict[str, Held] = {}
        self._held: dict[str, Held] = {}
        self._updates: list[Update] = []
        self._shared: list[Tensor] = []
        self._statistics: list[int] = []
        """Which of the shared tensors are no parameters, but what batch normalisation and its like have measured. These
        are sent as they are where moves are sent in a code: they are no sums of moves but go part of the way to what
        was measured last, so that what a code keeps back overshoots when it comes, a variance to below zero.
        """
        self._bytes_before = 0
        self._bytes_told = 0
        self._bytes_of_earlier = 0

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        self.detach()
        self._collective = collective
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._own = held_tensors(model, pieces, is_counted=True)
        first = collective.rank == 0
        self._held = {name: Held(held.tensor, held.piece.counted(first)) for name, held in self._own.items()}
        self._updates = updated_whole(model, self._own)
        shared = {name: held.tensor for name, held in self._own.items() if held.tensor.is_floating_point()}
        self._shared = list(shared.values())
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._statistics = [index for index, name in enumerate(shared) if name not in parameters]
        self._bytes_before = self._bytes_told = collective.own_bytes_sent

    def detach(self) -> None:
        if self._collective is not None:
            self._bytes_of_earlier = self.bytes_sent_total
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters = []
        self._collective = None

    def updates(self) -> list[Update]:
        return self._updates

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def held(self) -> dict[str, Held]:
        return self._held

    def own(self) -> dict[str, Held]:
        """As `held`, every replica's counted."""
        return self._own

    def before_step(self, step: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._bytes_told = self.joined().own_bytes_sent

    def finish(self, extras: Sequence[float]) -> list[float]:
        """Nothing is sent: the extras are this replica's own."""
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
        """Within it the model is what the replicas agree on, the same everywhere: here their mean. All replicas call.

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
        """Take what the replicas agree on for good, as they do when the training ends. All replicas call."""
        self.take_mean(self._shared)

    @torch.no_grad()
    def take_mean(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor by its mean over the replicas, in place, the same bits on each of them."""
        collective = self.joined()
        if collective.size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in by_kind.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            collective.all_reduce(flat)
            flat /= collective.size
            for tensor, part in zip(same, flat.split_with_sizes([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    @property
    def bytes_sent(self) -> int:
        return self.joined().own_bytes_sent - self._bytes_told

    @property
    def bytes_sent_total(self) -> int:
        if self._collective is None:
            return self._bytes_of_earlier
        return self._bytes_of_earlier + self._collective.own_bytes_sent - self._bytes_before

    @property
    def bytes_dense_total(self) -> int:
        return self.bytes_sent_total

    @property
    def asked_bytes(self) -> int:
        """What this replica has caused to be sent over connections of the scheme's own, both ways: of all replicas
        together, whenever none waits for an answer, all that went over them since the exchanges were made.
        """
        return 0

    def joined(self) -> Collective:
        if self._collective is None:
            raise TrainingError("The exchange is not attached to a model and a collective.")
        return self._collective
