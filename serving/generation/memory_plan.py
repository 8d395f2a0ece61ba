"""How many processes a model must be divided over to fit: counted on the model's shapes, without its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from orchestray.platform.errors import ConfigError
from orchestray.serving.generation.partition import held_bytes, layer_bytes, plain_model
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


def plan_memory(
    task: Task,
    limit_bytes: float,
    *,
    dtype: torch.dtype = torch.float32,
    reserve_bytes: float = 0.0,
    num_stages: int | None = None,
) -> MemoryPlan:
    """Cut a task's model into the fewest stages whose tensors fit, and among those cuts into the most even one.

    Args:
        task: whose model it is.
        limit_bytes: of memory that one process has.
        dtype: of the tensors that are floating-point numbers.
        reserve_bytes: of it, for activations and for cached keys and values.
        num_stages: so many in place of the fewest.

    Raises:
        ConfigError: there is a layer that does not fit alone, or the stages do not.
    """
    model = plain_model(task).to(dtype)
    layers = layers_of(task, model)
    costs, room_bytes = layer_bytes(layers), limit_bytes - reserve_bytes
    largest = max(range(len(costs)), key=costs.__getitem__)
    if costs[largest] > room_bytes:
        raise ConfigError(
            f"The layer {layers.names[largest]} takes {_shown(costs[largest])}, and a process has {_shown(room_bytes)} "
            f"for it: split the layers over workers, too (strategy.network.tensor: at least "
            f"{-(-int(costs[largest]) // max(1, int(room_bytes)))})."
        )
    wanted = num_stages or fewest_stages(costs, room_bytes, layers.forbidden_cuts)
    bounds = balanced(costs, wanted, costs, room_bytes, forbidden=layers.forbidden_cuts)
    return MemoryPlan(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_bytes=held_bytes([model]),
        stages=tuple(
            StageMemory(layers.names[start], layers.names[stop - 1], held_bytes([layers.part(start, stop)]))
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
