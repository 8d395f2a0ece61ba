"""How many processes a model must be divided over to fit: counted on the model's shapes, without its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from orchestray.platform.errors import ConfigError
from orchestray.serving.generation.partition import plain_model
from orchestray.trainers.pipeline.balance import balanced
from orchestray.trainers.pipeline.cutting import layers_of

if TYPE_CHECKING:
    from orchestray.platform.task import Task


@dataclass(frozen=True)
class StageMemory:
    """One stage of a pipeline."""

    first_layer: str
    last_layer: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """A model cut into as few stages as fit."""

    num_parameters: int
    num_bytes: int
    """Of the whole model."""
    stages: tuple[StageMemory, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def most_bytes(self) -> int:
        """Of the largest stage."""
        return max(stage.num_bytes for stage in self.stages)


@dataclass(frozen=True)
class LayerSizes:
    """What each layer of a model holds; a tensor that several share is counted in each."""

    names: tuple[str, ...]
    num_values: tuple[int, ...]
    """Floating-point numbers."""
    other_bytes: tuple[int, ...]
    """Of all other tensors."""
    forbidden_cuts: frozenset[int]
    num_parameters: int

    @classmethod
    def of(cls, task: Task) -> Self:
        """Of a task's model, which is not given memory."""
        model = plain_model(task)
        layers = layers_of(task, model)
        parts = [layers.part(index, index + 1) for index in range(len(layers))]
        held = [{id(t): t for t in (*part.parameters(), *part.buffers())}.values() for part in parts]
        return cls(
            tuple(layers.names),
            tuple(sum(tensor.numel() for tensor in each if tensor.is_floating_point()) for each in held),
            tuple(sum(tensor.nbytes for tensor in each if not tensor.is_floating_point()) for each in held),
            frozenset(layers.forbidden_cuts),
            sum(parameter.numel() for parameter in model.parameters()),
        )

    def plan(
        self,
        limit_bytes: float,
        *,
        dtype: torch.dtype = torch.float32,
        reserve_bytes: float = 0.0,
        num_stages: int | None = None,
    ) -> MemoryPlan:
        """Cut into the fewest stages whose tensors fit, and among those cuts into the most even one.

        Args:
            limit_bytes: of memory that one process has.
            dtype: of the tensors that are floating-point numbers.
            reserve_bytes: of it, for activations and for cached keys and values.
            num_stages: so many in place of the fewest.

        Raises:
            ConfigError: there is a layer that does not fit alone, or the stages do not.
        """
        values = zip(self.num_values, self.other_bytes, strict=True)
        sizes = [float(count * dtype.itemsize + other) for count, other in values]
        room_bytes = limit_bytes - reserve_bytes
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] > room_bytes:
            raise ConfigError(
                f"The layer {self.names[largest]} takes {_shown(sizes[largest])}, and a process has "
                f"{_shown(room_bytes)} for it: split the layers over workers, too (strategy.network.tensor: at least "
                f"{-(-int(sizes[largest]) // max(1, int(room_bytes)))})."
            )
        wanted = num_stages or fewest_stages(sizes, room_bytes, self.forbidden_cuts)
        bounds = balanced(sizes, wanted, sizes, room_bytes, forbidden=self.forbidden_cuts)
        return MemoryPlan(
            self.num_parameters,
            int(sum(sizes)),
            tuple(
                StageMemory(self.names[start], self.names[stop - 1], int(sum(sizes[start:stop])))
                for start, stop in bounds
            ),
        )


def fewest_stages(costs: Sequence[float], limit: float, forbidden: Collection[int] = ()) -> int:
    """Of consecutive layers, none above the limit: each stage takes as many layers as it can, which is best.

    Args:
        costs: of each layer.
        limit: of a stage.
        forbidden: layers that must not begin a stage: they are of one piece with the layer before.
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
