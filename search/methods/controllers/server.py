"""Learned values of controllers, in shards of the platform's parameter servers (`trainers.ps`).

Zoph and Le 2017, section 3.2 "Accelerate training with parallelism": S shards hold the parameters of K controller
replicas. Each replica draws children with its copy, and sends the gradient when its whole batch is trained.

The shards hold the difference of each parameter from its initial value, and have room for more options than have
occurred. The initial values of an option depend on its name alone, so that a shard need not know the options.

`ParameterServer` has the shards in this process. A search on Ray moves them to processes of their own (`hosts`), which
apply the same entries to the same state machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import Entry, Origin, Part, Push
from orchestray.trainers.ps.protocol.state import slots_of_shard, whole_slots
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine

_OPTIONS = "option."
"""Prefix of the parameters that have a row for each option."""
_LEAST_ROWS = 64


@dataclass(frozen=True)
class Layout:
    """The parameters of a controller as one vector, which is cut into shards."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each parameter, with all the rows there is room for."""
    num_shards: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], num_shards: int) -> Layout:
        """Return a layout with room for these parameters, and for some further options."""
        rows = _LEAST_ROWS
        while rows < max(len(tensor) for name, tensor in parameters.items() if name.startswith(_OPTIONS)):
            rows *= 2
        shapes = {
            name: (rows, *tensor.shape[1:]) if name.startswith(_OPTIONS) else tuple(tensor.shape)
            for name, tensor in parameters.items()
        }
        return cls(tuple(shapes.items()), num_shards)

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return True if there is room for all rows of these parameters."""
        return all(len(parameters[name]) <= shape[0] for name, shape in self.parameters)

    @cached_property
    def partition(self) -> Partition:
        """Ranges of the shards."""
        return Partition(self.parameters, self.num_shards)

    def cut(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return each shard's part of the parameters, or of their gradients; rows that are missing are zeros."""
        flat, begin = torch.zeros(self.partition.num_elements, dtype=torch.float64), 0
        for name, shape in self.parameters:
            values = tensors[name].detach().reshape(-1)
            flat[begin : begin + len(values)] = values
            begin += math.prod(shape)
        return [part.clone() for part in self.partition.cut(flat)]

    def joined(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name from the parts of all shards."""
        sizes = [math.prod(shape) for _, shape in self.parameters]
        pieces = torch.cat(list(parts)).split_with_sizes(sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.parameters, pieces, strict=True)}


@dataclass(frozen=True)
class Learned:
    """The state of all shards."""

    layout: Layout
    versions: tuple[int, ...]
    """Number of updates of each shard."""
    values: Mapping[str, Tensor]
    """Learned values by parameter."""
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the optimizer by "<parameter>.<slot>"; empty before the first update."""

    @classmethod
    def of(cls, layout: Layout, versions: Sequence[int], snapshots: Sequence[Mapping[str, Tensor]]) -> Learned:
        """Return the state of shards from the snapshot of each, as `ShardServer.snapshot` returns it."""
        values = layout.joined([snapshot["values"] for snapshot in snapshots])
        return cls(layout, tuple(versions), values, whole_slots(layout.partition, snapshots))

    def in_layout(self, layout: Layout) -> Learned:
        """Return the state in a layout with more rows, whose values and moments are zeros."""
        shapes = dict(layout.parameters)
        values = {name: _padded(tensor, shapes[name]) for name, tensor in self.values.items()}
        slots = {name: _padded(tensor, shapes[name.rpartition(".")[0]]) for name, tensor in self.slots.items()}
        return Learned(layout, self.versions, values, slots)

    def machine(self, shard: int, learning_rate: float) -> Machine:
        """Return the state machine of a shard, which updates by Adam at every push (Kingma and Ba, 2015)."""
        slices, values = self.layout.partition.slices(shard), self.layout.cut(self.values)[shard]
        made = Shard(slices, values, make_optimizer("adam"), Rates(learning_rate), version=self.versions[shard])
        if self.slots:
            made.load_optimizer(slots_of_shard(slices, self.slots))
        return Machine(made)


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    if not tensor.dim():
        return tensor
    padded = tensor.new_zeros(tuple(shape))
    padded[: len(tensor)] = tensor
    return padded


def push_of(controller: int, number: int, read_version: int, num_controllers: int) -> Push:
    """Return what goes with a controller's gradient.

    Args:
        controller: index of the controller.
        number: number of its batch, from 1.
        read_version: version of the shard in the parameters that the batch was drawn with.
        num_controllers: number of controllers.
    """
    return Push(origin=Origin(controller, (Part(number, controller, 1, num_controllers),), read_version))


class ParameterServer:
    """Shards in this process."""

    def __init__(
        self, parameters: Mapping[str, Tensor], *, shards: int = 1, learning_rate: float = 0.01, controllers: int = 1
    ) -> None:
        """
        Args:
            parameters: initial parameters, of which only the shapes count.
            shards: number of shards.
            learning_rate: learning rate of Adam.
            controllers: number of controllers that push.
        """
        self.learning_rate = learning_rate
        self._num_controllers = controllers
        layout = Layout.of(parameters, shards)
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in layout.parameters}
        self.load(Learned(layout, (0,) * shards, zeros))

    @property
    def versions(self) -> list[int]:
        """Number of updates of each shard."""
        return [machine.shard.version for machine in self.machines]

    def fetch(self) -> dict[str, Tensor]:
        """Return a copy of what was learned, by parameter, with all rows there is room for."""
        return self.layout.joined([machine.shard.values for machine in self.machines])

    def push(
        self, gradients: Mapping[str, Tensor], versions: Sequence[int], *, controller: int = 0, number: int
    ) -> list[int]:
        """Update all shards by a gradient.

        Args:
            gradients: gradient of each parameter, to ascend.
            versions: version of each shard in the parameters with which it was computed.
            controller: index of the controller.
            number: number of its batch, from 1.

        Returns:
            The staleness at each shard: number of updates by others in between.
        """
        if not self.layout.holds(gradients):
            self.load(self.state().in_layout(Layout.of(gradients, self.layout.num_shards)))
        stale = []
        for machine, part, read in zip(self.machines, self.layout.cut(gradients), versions, strict=True):
            push = push_of(controller, number, read, self._num_controllers)
            stale.append(machine.apply(Entry(worker=controller, push=push), [-part]).staleness)
        return stale

    def state(self) -> Learned:
        """Return a copy of the whole state."""
        snapshots = [
            {name: tensor.clone() for name, tensor in machine.shard.tensors().items()} for machine in self.machines
        ]
        return Learned.of(self.layout, self.versions, snapshots)

    def load(self, state: Learned) -> None:
        """Continue from a state."""
        self.layout = state.layout
        self.machines = [state.machine(shard, self.learning_rate) for shard in range(state.layout.num_shards)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole state for `load_state_tensors`."""
        state = self.state()
        tensors = {"versions": torch.tensor(state.versions)}
        tensors |= {f"value/{name}": tensor for name, tensor in state.values.items()}
        return tensors | {f"slot/{name}": tensor for name, tensor in state.slots.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a copy of the result of `state_tensors`."""
        values, slots = (
            {name.removeprefix(kind): tensor.clone() for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in ("value/", "slot/")
        )
        layout = Layout(
            tuple((name, tuple(values[name].shape)) for name, _ in self.layout.parameters), len(self.machines)
        )
        self.load(Learned(layout, tuple(tensors["versions"].tolist()), values, slots))
