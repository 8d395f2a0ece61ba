"""Progressive training: a network that grows while it is trained (Karras et al., "Progressive Growing of GANs for
Improved Quality, Stability, and Variation", ICLR 2018, section 2).

Depth and resolution grow together: level k is a block more, and inputs twice as fine. A new level is faded in: at first
the network is exactly what it was before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.platform.task import TaskSource
from orchestray.search.spaces.network import image_shape
from orchestray.search.spaces.searched_task import shapes_of
from orchestray.trainers import tasks

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

    from orchestray.platform.task import Batch, Task


@dataclass(frozen=True)
class Growth:
    """When levels come."""

    levels: int
    every_steps: int
    """A level is added after each so many steps."""
    fade_steps: int
    """Steps in which it is faded in."""

    def at(self, step: int) -> tuple[int, float]:
        """The level, from 0, and how far it is faded in, after so many steps; level 0 is there from the start."""
        level = min(step // self.every_steps, self.levels - 1)
        since = step - level * self.every_steps
        return level, 1.0 if level == 0 else min(1.0, since / self.fade_steps)


class GrowingNetwork(nn.Module):
    """Blocks of convolutions between a first layer and a last; those not grown yet are not computed.

    It counts its forward passes in training mode, in a buffer, so that a checkpoint knows where it is.
    """

    passes: Tensor

    def __init__(self, growth: Growth, input_shape: Sequence[int], num_outputs: int, channels: int) -> None:
        """
        Args:
            growth: when levels come.
            input_shape: of one sample: an image, or the features of a square one.
            num_outputs: of the last layer.
            channels: of each block.
        """
        super().__init__()
        self.growth = growth
        self.image_shape = image_shape(input_shape)
        self.first = nn.Conv2d(self.image_shape[0], channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(growth.levels))
        self.last = nn.Linear(channels, num_outputs)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.now: tuple[int, float] = (0, 1.0)
        """Level and fade-in of the latest pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.now = self.growth.at(int(self.passes))
        if self.training:
            self.passes += 1
        return self.at(inputs, *self.now)

    def at(self, inputs: Tensor, level: int, fade_in: float) -> Tensor:
        """The outputs at a level; at `fade_in` 0 those of the level before."""
        images = inputs.reshape(len(inputs), *self.image_shape)
        if level == 0:
            return self._outputs(images, 0)
        if fade_in == 0.0:
            return self._outputs(images, level - 1)
        if fade_in == 1.0:
            return self._outputs(images, level)
        before, after = self._outputs(images, level - 1), self._outputs(images, level)
        return (1 - fade_in) * before + fade_in * after

    def _outputs(self, images: Tensor, level: int) -> Tensor:
        coarse = 2 ** min(self.growth.levels - 1 - level, _halvings(self.image_shape[1:]))
        values = torch.relu(self.first(functional.avg_pool2d(images, coarse) if coarse > 1 else images))
        for block in self.blocks[: level + 1]:
            values = values + torch.relu(block(values))
        outputs: Tensor = self.last(values.mean(dim=(2, 3)))
        return outputs


class GrowingTask:
    """A task with a network that grows in place of its own: `task: {type:
    "orchestray.search.trials.one_shot.growing:GrowingTask", task: {type: digits}, levels: 3, ...}`.

    Validations say the level and how far it is faded in. A step is a forward pass of a worker: `train.accumulate`,
    micro-batches and `train.recompute` make several of one step, and growth that much faster.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        levels: int = 3,
        every_steps: int = 100,
        fade_steps: int = 50,
        channels: int = 16,
        input_shape: Sequence[int] | None = None,
        num_outputs: int | None = None,
    ) -> None:
        """
        Args:
            task: a `task` section: of a built-in task, or of one in a module.
            levels: of growth; 1: the network is as it is.
            every_steps: a level is added after each so many steps.
            fade_steps: in which it is faded in; at most `every_steps`.
            channels: of each block.
            input_shape: of one sample; default: found in the data.
            num_outputs: default: found by the task's own model.

        Raises:
            ConfigError: the numbers make no sense.
        """
        wrong = {"levels": levels, "every_steps": every_steps, "fade_steps": fade_steps, "channels": channels}
        problems = [f"task.{name}: must be >= 1, got {value}" for name, value in wrong.items() if value < 1]
        if fade_steps > every_steps:
            problems.append(f"task.fade_steps: must be at most every_steps ({every_steps}), got {fade_steps}")
        if problems:
            raise ConfigError(problems)
        arguments = {name: value for name, value in task.items() if name != "type"}
        self.task: Task = tasks.build(TaskSource(task["type"], arguments))
        self.growth = Growth(levels, every_steps, fade_steps)
        self._channels = channels
        self._shapes = None if input_shape is None or num_outputs is None else (tuple(input_shape), num_outputs)
        self._network: GrowingNetwork | None = None

    def build_model(self) -> nn.Module:
        """The network at level 0."""
        self._network = GrowingNetwork(self.growth, *self.shapes(), self._channels)
        return self._network

    def shapes(self) -> tuple[tuple[int, ...], int]:
        """Shape of one sample's inputs, and the number of outputs."""
        if self._shapes is None:
            self._shapes = shapes_of(self.task)
        return self._shapes

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        return self.task.dataset(split)

    def to_batch(self, columns: pa.Table) -> Batch:
        return self.task.to_batch(columns)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return self.task.loss(outputs, batch)

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Those of the task, with `level` and `fade_in`."""
        level, fade_in = (0, 1.0) if self._network is None else self._network.now
        grown = {"level": torch.tensor(float(level)), "fade_in": torch.tensor(fade_in)}
        return {**self.task.metrics(outputs, batch), **grown}

    def rebuild_arguments(self) -> dict[str, Any]:
        """Arguments with which the same network is built without the data."""
        input_shape, num_outputs = self.shapes()
        return {"input_shape": list(input_shape), "num_outputs": num_outputs}


def _halvings(sides: Sequence[int]) -> int:
    """How often the sides can be halved and leave two pixels."""
    return max(0, min(sides).bit_length() - 2)
