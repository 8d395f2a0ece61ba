"""Ensembles: each replica is a member, trained on every sample by itself; at most the trunk's gradient is sent.

Separate members: Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 7.3. With a
shared trunk: Lee et al., "Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks" (2015),
section 3 (TreeNets).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.trainers.core.exchange import LocalTensor, OptimizedTensor
from orchestray.trainers.core.members import member_name
from orchestray.trainers.ensemble.ensemble import Average
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.sync.common.local_updates import LocalUpdates

_GROUP = "independent"


class Independent(LocalUpdates):
    """Members of an ensemble, whose tensors are saved under the names "members.<i>.<name>".

    With a trunk the first layers are the same in all members. Each member begins with those of member 0. Their gradient
    is the mean over the members, which each have their own samples. Floating-point buffers of the trunk (running
    statistics) are averaged too.

    Args:
        average: what the trained ensemble averages for its answer; changes nothing here.
        trunk: number of first layers that are shared; `share` sets their tensors' names.
    """

    shares_batch = False

    def __init__(self, average: Average = "outputs", trunk: int = 0) -> None:
        super().__init__()
        self.takes_complex = trunk == 0
        self.average: Average = average
        self.num_trunk_layers = trunk
        self.shared_names: frozenset[str] = frozenset()
        """Names of the trunk's parameters and buffers, in the plain model."""
        self._trunk: list[Tensor] = []
        """Trainable parameters that are shared."""
        self._trunk_buffers: list[Tensor] = []

    def share(self, names: Collection[str]) -> None:
        """Set the plain model's names of the trunk's parameters and buffers; call this before `attach`."""
        self.shared_names = frozenset(names)

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        # A separate group: the loop's own messages between segments do not belong to the exchange.
        super().attach(model, collective.sibling(_GROUP), pieces)
        shared = {key for key, held in self._own.items() if held.piece.name in self.shared_names}
        self._own = {
            key: LocalTensor(held.tensor, _renamed(held.piece, collective.rank)) for key, held in self._own.items()
        }
        self._held = self._own
        named = dict(model.named_parameters())
        self._trunk = [named[key] for key in shared_in_order(named, shared) if named[key].requires_grad]
        self._trunk_buffers = [
            held.tensor
            for key, held in self._own.items()
            if key in shared and key not in named and held.tensor.is_floating_point()
        ]
        self._updates = [
            OptimizedTensor(update.name, update.tensor, _renamed(update.piece, collective.rank))
            for update in self._updates
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
        parts = [torch.zeros_like(p) if p.grad is None else dense(p.grad) for p in self._trunk]
        parts.append(parts[0].new_tensor(used))
        flat = flatten(parts)
        collective.all_reduce(flat)
        *sums, counts = unflatten(flat, parts)
        for parameter, total, count in zip(self._trunk, sums, counts.tolist(), strict=True):
            parameter.grad = total / collective.size if count else None

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        sums = super().finish(extras)
        self.average_trunk()
        return sums

    def after_step(self, step: int) -> None:
        if self._trunk_buffers:
            self.take_mean(self._trunk_buffers)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Keep each member as it is: it is validated and saved by itself."""
        yield

    def agree(self) -> None:
        """Do nothing: members never agree."""


def shared_in_order(names: Collection[str], shared: Collection[str]) -> list[str]:
    """Return those of `names` that are shared, in the order of `names`."""
    return [name for name in names if name in shared]


def _renamed(piece: TensorSlice, member: int) -> TensorSlice:
    return replace(piece, name=member_name(member, piece.name))


@torch.no_grad()
def _take_from_first(tensor: Tensor, collective: Collective) -> None:
    if collective.size == 1 or not tensor.numel():
        return
    values = tensor.detach().contiguous()
    collective.broadcast(values, 0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
