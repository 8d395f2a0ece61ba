"""The parameters of several controllers, held in shards that count their updates.

Zoph and Le 2017, section 3.2 "Accelerate training with parallelism": S shards hold the parameters of K controller
replicas. Each replica draws children with its copy, and sends the gradient when its whole batch is trained. Here the
replicas are parts of one method, so that a search can be replayed from its journal. They see what replicas in separate
processes would see: a copy of some version, and updates by others in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


@dataclass
class _Slot:
    """A parameter with its moments of Adam (Kingma and Ba, 2015)."""

    value: Tensor
    mean: Tensor
    square: Tensor


@dataclass
class Shard:
    """A part of the parameters."""

    slots: dict[str, _Slot] = field(default_factory=dict)
    version: int = 0
    """Number of updates."""

    def grow(self, name: str, value: Tensor) -> None:
        """Add the rows of a parameter that the shard does not hold yet."""
        slot = self.slots.setdefault(name, _Slot(value[:0].clone(), value[:0].clone(), value[:0].clone()))
        added = value[len(slot.value) :]
        slot.value = torch.cat([slot.value, added])
        slot.mean = torch.cat([slot.mean, torch.zeros_like(added)])
        slot.square = torch.cat([slot.square, torch.zeros_like(added)])

    def ascend(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the parameters by one ascending step of Adam."""
        self.version += 1
        scale = learning_rate * (1 - _BETA2**self.version) ** 0.5 / (1 - _BETA1**self.version)
        for name, slot in self.slots.items():
            gradient = gradients[name]
            slot.mean.lerp_(gradient, 1 - _BETA1)
            slot.square.lerp_(gradient.square(), 1 - _BETA2)
            slot.value += scale * slot.mean / (slot.square.sqrt() + _EPS)


class ParameterServer:
    """Shards of whole parameters that are updated together: all have the same version."""

    def __init__(self, parameters: Mapping[str, Tensor], *, shards: int = 1, learning_rate: float = 0.01) -> None:
        """
        Args:
            parameters: initial parameters; copied.
            shards: number of shards; parameters are assigned to them by turns.
            learning_rate: learning rate of Adam.
        """
        self.shards = [Shard() for _ in range(shards)]
        self._learning_rate = learning_rate
        self._home = {name: index % shards for index, name in enumerate(parameters)}
        self._take(parameters)

    @property
    def version(self) -> int:
        """Number of updates."""
        return self.shards[0].version

    def fetch(self) -> tuple[int, dict[str, Tensor]]:
        """Return the version, and a copy of the parameters."""
        copies = {name: self.shards[home].slots[name].value.clone() for name, home in self._home.items()}
        return self.version, copies

    def push(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], version: int) -> int:
        """Update the parameters by a gradient.

        Args:
            gradients: gradient of each parameter, to ascend.
            parameters: parameters with which they were computed; their new rows are added.
            version: version of these parameters.

        Returns:
            The staleness: number of updates by others in between.
        """
        staleness = self.version - version
        self._take(parameters)
        for index, shard in enumerate(self.shards):
            own = {name: gradients[name] for name, home in self._home.items() if home == index}
            shard.ascend({name: _as_long_as(own[name], shard.slots[name].value) for name in own}, self._learning_rate)
        return staleness

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole state for `load_state_tensors`; not copied."""
        tensors = {"version": torch.tensor(self.version)}
        for shard in self.shards:
            for name, slot in shard.slots.items():
                tensors |= {f"{name}/{kind}": tensor for kind, tensor in vars(slot).items()}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a copy of the result of `state_tensors`."""
        for shard in self.shards:
            shard.version = int(tensors["version"])
            for name in shard.slots:
                kinds = ("value", "mean", "square")
                shard.slots[name] = _Slot(*(tensors[f"{name}/{kind}"].clone() for kind in kinds))

    def _take(self, parameters: Mapping[str, Tensor]) -> None:
        for name, value in parameters.items():
            self.shards[self._home[name]].grow(name, value)


def _as_long_as(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the gradient with zeros for the rows that its controller did not have."""
    missing = len(value) - len(gradient)
    return gradient if not missing else torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
