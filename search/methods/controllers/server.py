"""The parameters of several controllers, held in shards that know how often they have been updated.

Zoph and Le 2017, section 3.2 "Accelerate training with parallelism": S shards hold the parameters of K controller
replicas; each replica draws children with its copy, and sends the gradient when its whole batch is trained. Here the
replicas are parts of one method, so that a search can be made again from its journal; what they see of each other is
what replicas in processes of their own would see: a copy of some version, and updates by others in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


@dataclass
class _Slot:
    """A parameter with what Adam (Kingma and Ba, 2015) remembers of it."""

    value: Tensor
    mean: Tensor
    square: Tensor


@dataclass
class Shard:
    """Some of the parameters."""

    slots: dict[str, _Slot] = field(default_factory=dict)
    version: int = 0
    """Updates that have been made."""

    def grow(self, name: str, value: Tensor) -> None:
        """Take the rows of a parameter that it does not hold yet."""
        slot = self.slots.setdefault(name, _Slot(value[:0].clone(), value[:0].clone(), value[:0].clone()))
        added = value[len(slot.value) :]
        slot.value = torch.cat([slot.value, added])
        slot.mean = torch.cat([slot.mean, torch.zeros_like(added)])
        slot.square = torch.cat([slot.square, torch.zeros_like(added)])

    def ascend(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """One update by Adam, uphill."""
        self.version += 1
        scale = learning_rate * (1 - _BETA2**self.version) ** 0.5 / (1 - _BETA1**self.version)
        for name, slot in self.slots.items():
            gradient = gradients[name]
            slot.mean.lerp_(gradient, 1 - _BETA1)
            slot.square.lerp_(gradient.square(), 1 - _BETA2)
            slot.value += scale * slot.mean / (slot.square.sqrt() + _EPS)


class ParameterServer:
    """Shards, each holding whole parameters, that are updated together: all have the same version."""

    def __init__(self, parameters: Mapping[str, Tensor], *, shards: int = 1, learning_rate: float = 0.01) -> None:
        """
        Args:
            parameters: to begin with; copied.
            shards: how many; parameters go to them by turns.
            learning_rate: of Adam.
        """
        self.shards = [Shard() for _ in range(shards)]
        self._learning_rate = learning_rate
        self._home = {name: index % shards for index, name in enumerate(parameters)}
        self._take(parameters)

    @property
    def version(self) -> int:
        """Updates that have been made."""
        return self.shards[0].version

    def fetch(self) -> tuple[int, dict[str, Tensor]]:
        """The version, and a copy of the parameters."""
        copies = {name: self.shards[home].slots[name].value.clone() for name, home in self._home.items()}
        return self.version, copies

    def push(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor], version: int) -> int:
        """Update by a gradient.

        Args:
            gradients: to ascend, by parameter.
            parameters: what they were computed with; rows that are new here are taken from it.
            version: that of these parameters.

        Returns:
            how many updates by others came in between.
        """
        staleness = self.version - version
        self._take(parameters)
        for index, shard in enumerate(self.shards):
            own = {name: gradients[name] for name, home in self._home.items() if home == index}
            shard.ascend({name: _as_long_as(own[name], shard.slots[name].value) for name in own}, self._learning_rate)
        return staleness

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything, for `load_state_tensors`; not copied."""
        tensors = {"version": torch.tensor(self.version)}
        for shard in self.shards:
            for name, slot in shard.slots.items():
                tensors |= {f"{name}/{kind}": tensor for kind, tensor in vars(slot).items()}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a copy of what `state_tensors` gave."""
        for shard in self.shards:
            shard.version = int(tensors["version"])
            for name in shard.slots:
                kinds = ("value", "mean", "square")
                shard.slots[name] = _Slot(*(tensors[f"{name}/{kind}"].clone() for kind in kinds))

    def _take(self, parameters: Mapping[str, Tensor]) -> None:
        for name, value in parameters.items():
            self.shards[self._home[name]].grow(name, value)


def _as_long_as(gradient: Tensor, value: Tensor) -> Tensor:
    """With zeros for the rows that its controller had not met."""
    missing = len(value) - len(gradient)
    return gradient if not missing else torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
