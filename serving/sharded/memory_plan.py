"""The number of processes over which a model must be divided to fit, from its shapes, without allocating it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from orchestray.platform.errors import ConfigError
from orchestray.serving.sharded.partition import plain_model
from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced
from orchestray.trainers.parallel.pipeline.cutting import layers_of

if TYPE_CHECKING:
    from orchestray.platform.task import Task


@dataclass(frozen=True)
class MemoryPlan:
    """A model cut into as few stages as fit."""

    bounds: Bounds
    """First layer of each stage, and that behind its last."""
    stage_bytes: tuple[int, ...]
    """Size of each stage."""

    @property
    def num_stages(self) -> int:
        return len(self.bounds)


@dataclass(frozen=True)
class LayerSizes:
    """The size of each layer of a model; a tensor that several share is counted in each."""

    names: tuple[str, ...]
    num_values: tuple[int, ...]
    """Number of floating-point numbers."""
    other_bytes: tuple[int, ...]
    """Size of all other tensors."""
    forbidden_cuts: frozenset[int]
    num_parameters: int

    @classmethod
    def of(cls, task: Task, load_example: Callable[[], Any]) -> Self:
        """Return the sizes of a task's model, which is not allocated.

        Args:
            task: the task.
            load_example: returns one sample's inputs, which are needed by a model of several inputs.
        """
        model = plain_model(task)
        takes_one = len(inspect.signature(model.forward).parameters) == 1
        layers = layers_of(task, model, inputs=None if takes_one else load_example())
        parts = [layers.part(index, index + 1) for index in range(len(layers))]
        held = [{id(t): t for t in (*part.parameters(), *part.buffers())}.values() for part in parts]
        return cls(
            tuple(layers.names),
            tuple(sum(tensor.numel() for tensor in each if tensor.is_floating_point()) for each in held),
            tuple(sum(tensor.nbytes for tensor in each if not tensor.is_floating_point()) for each in held),
            frozenset(layers.forbidden_cuts),
            sum(parameter.numel() for parameter in model.parameters()),
        )

    def plan(self, limit_bytes: float, *, dtype: torch.dtype = torch.float32) -> MemoryPlan:
        """Cut into the fewest stages whose tensors fit, and among such cuts choose the most even one.

        Args:
            limit_bytes: memory of one process.
            dtype: type of the floating-point tensors.

        Raises:
            ConfigError: a layer does not fit alone.
        """
        values = zip(self.num_values, self.other_bytes, strict=True)
        sizes = [float(count * dtype.itemsize + other) for count, other in values]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] > limit_bytes:
            raise ConfigError(
                f"The layer {self.names[largest]} takes {_shown(sizes[largest])}, and a process has "
                f"{_shown(limit_bytes)} for it: split the layers over workers, too (strategy.network.tensor: at least "
                f"{-(-int(sizes[largest]) // max(1, int(limit_bytes)))})."
            )
        fewest = fewest_stages(sizes, limit_bytes, self.forbidden_cuts)
        bounds = balanced(sizes, fewest, sizes, limit_bytes, forbidden=self.forbidden_cuts)
        return MemoryPlan(bounds, tuple(int(sum(sizes[start:stop])) for start, stop in bounds))


def fewest_stages(costs: Sequence[float], limit: float, forbidden: Collection[int] = ()) -> int:
    """Return the fewest stages of consecutive layers, none above the limit: greedy packing is optimal.

    Args:
        costs: cost of each layer.
        limit: largest cost of a stage.
        forbidden: indices of layers that must stay in one stage with the layer before.
    """
    pieces: list[float] = []
    for index, cost in enumerate(costs):
        if index in forbidden:
            pieces[-1] += cost
        else:
            pieces.append(cost)
    count, held = 1, 0.0
    for cost in pieces:
        if held + cost > limit:
            count, held = count + 1, 0.0
        held += cost
    return count


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
