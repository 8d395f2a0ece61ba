"""Ensembles: each replica is a member, trained on every sample by itself; nothing is sent, or the trunk's gradient.

Members apart: Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 7.3. With a
shared trunk: Lee et al., "Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks" (2015),
section 3 (TreeNets).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.trainers.consolidation.ensemble import Average
from orchestray.trainers.consolidation.members import member_name
from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.exchange.diverging import Diverging
from orchestray.trainers.layout.pieces import Piece

_GROUP = "independent"


class Independent(Diverging):
    """Members of an ensemble, whose tensors are saved under the names "members.<i>.<name>".

    With a trunk the first layers are the same in all members: each begins with those of member 0, and their gradient is
    the mean over the members, each of whose samples are its own. Floating-point buffers of the trunk (running
    statistics) are averaged too.

    Args:
        average: what the trained ensemble answers with the mean of; changes nothing here.
        trunk: number of first layers that are shared; their tensors' names are told by `share`.
    """

    shares_batch = False

    def __init__(self, average: Average = "outputs", trunk: int = 0) -> None:
        super().__init__()
        self.average: Average = average
        self.num_trunk_layers = trunk
        self.shared_names: frozenset[str] = frozenset()
        """Of the trunk's parameters and buffers, in the plain model."""
        self._trunk: list[Tensor] = []
        """Trainable parameters that are shared."""
        self._trunk_buffers: list[Tensor] = []

    def share(self, names: Collection[str]) -> None:
        """Before `attach`: the plain model's names of the parameters and buffers of the trunk."""
        self.shared_names = frozenset(names)

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        # A group of its own: what the loop tells between the segments is not the exchange's.
        super().attach(model, collective.sibling(_GROUP), pieces)
        shared = {key for key, held in self._own.items() if held.piece.name in self.shared_names}
        self._own = {key: Held(held.tensor, _renamed(held.piece, collective.rank)) for key, held in self._own.items()}
        self._held = self._own
        named = dict(model.named_parameters())
        self._trunk = [named[key] for key in shared_in_order(named, shared) if named[key].requires_grad]
        self._trunk_buffers = [
            held.tensor
            for key, held in self._own.items()
            if key in shared and key not in named and held.tensor.is_floating_point()
        ]
        self._updates = [
            Update(update.name, update.tensor, _renamed(update.piece, collective.rank)) for update in self._updates
        ]
        for key in shared_in_order(self._own, shared):
            _take_from_first(self._own[key].tensor, self.joined())

    def detach(self) -> None:
        super().detach()
        self._trunk, self._trunk_buffers = [], []

    @torch.no_grad()
    def average_trunk(self) -> None:
        """Take the mean of the trunk's gradients over the members, in one operation."""
        collective = self.joined()
        if not self._trunk or collective.size == 1:
            return
        # A parameter that no member used keeps no gradient, so that weight decay and momentum leave it alone.
        used = [0.0 if parameter.grad is None else 1.0 for parameter in self._trunk]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trunk]
        flat = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor(used)])
        collective.all_reduce(flat)
        *sums, counts = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
        for parameter, total, count in zip(self._trunk, sums, counts.tolist(), strict=True):
            parameter.grad = (total / collective.size).view(parameter.shape) if count else None

    def finish(self, extras: Sequence[float]) -> list[float]:
        told = super().finish(extras)
        self.average_trunk()
        return told

    def after_step(self, step: int) -> None:
        if self._trunk_buffers:
            self.take_mean(self._trunk_buffers)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Each member is judged and saved as it is."""
        yield

    def agree(self) -> None:
        """They never do."""


def shared_in_order(names: Collection[str], shared: Collection[str]) -> list[str]:
    """Those of `names` that are shared, in the order of `names`."""
    return [name for name in names if name in shared]


def _renamed(piece: Piece, member: int) -> Piece:
    return replace(piece, name=member_name(member, piece.name))


@torch.no_grad()
def _take_from_first(tensor: Tensor, collective: Collective) -> None:
    if collective.size == 1 or not tensor.numel():
        return
    values = tensor.detach().contiguous()
    collective.broadcast(values, 0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
