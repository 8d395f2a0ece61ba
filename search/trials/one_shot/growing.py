"""Progressive training: a network that grows while it is trained.

Karras et al., "Progressive Growing of GANs for Improved Quality, Stability, and Variation", ICLR 2018, section 2. Depth
and resolution grow together: each level adds a block and doubles the input resolution. A new level is faded in: at
first the network is exactly what it was before.
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
from orchestray.search.spaces.architectures.network import image_shape
from orchestray.search.spaces.searched_task import RebuiltTask
from orchestray.trainers import tasks

if TYPE_CHECKING:
    from orchestray.platform.task import Batch


@dataclass(frozen=True)
class Growth:
    """The schedule by which levels are added."""

    levels: int
    every_steps: int
    """Number of steps after which a level is added."""
    fade_steps: int
    """Number of steps in which it is faded in."""

    def at(self, step: int) -> tuple[int, float]:
        """Return the level (from 0) after `step` steps, and its fade-in from 0 to 1; level 0 is never faded in."""
        level = min(step // self.every_steps, self.levels - 1)
        since = step - level * self.every_steps
        return level, 1.0 if level == 0 else min(1.0, since / self.fade_steps)


class GrowingNetwork(nn.Module):
    """A network of convolution blocks between a first and a last layer; blocks of later levels are skipped.

    It counts its forward passes in training mode in a buffer, so that a checkpoint includes the progress.
    """

    passes: Tensor

    def __init__(self, growth: Growth, input_shape: Sequence[int], num_outputs: int, channels: int) -> None:
        """
        Args:
            growth: schedule of the levels.
            input_shape: shape of one sample: an image, or the features of a square one.
            num_outputs: width of the final layer.
            channels: channels of each block.
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
        """Return the outputs at a level; with `fade_in` 0 those of the level before."""
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


class GrowingTask(RebuiltTask):
    """A task with a growing network instead of its own model.

    Its config is `task: {type: "orchestray.search.trials.one_shot.growing:GrowingTask", task: {type: digits}, levels:
    3, ...}`. Validations report the level and its fade-in. Growth counts the forward passes of a worker. With
    `train.accumulate`, micro-batches or `train.recompute`, a step has several passes, and growth is that much faster.
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
            levels: number of levels; with 1 the network does not grow.
            every_steps: number of steps after which a level is added.
            fade_steps: number of steps in which it is faded in; at most `every_steps`.
            channels: channels of each block.
            input_shape: shape of one sample; default: found in the data.
            num_outputs: number of outputs; default: found with the task's own model.

        Raises:
            ConfigError: a number is out of range.
        """
        wrong = {"levels": levels, "every_steps": every_steps, "fade_steps": fade_steps, "channels": channels}
        problems = [f"task.{name}: must be >= 1, got {value}" for name, value in wrong.items() if value < 1]
        if fade_steps > every_steps:
            problems.append(f"task.fade_steps: must be at most every_steps ({every_steps}), got {fade_steps}")
        if problems:
            raise ConfigError(problems)
        arguments = {name: value for name, value in task.items() if name != "type"}
        super().__init__(tasks.build(TaskSource(task["type"], arguments)), input_shape, num_outputs)
        self.growth = Growth(levels, every_steps, fade_steps)
        self._channels = channels
        self._network: GrowingNetwork | None = None

    def build_model(self) -> nn.Module:
        """Return the network at level 0."""
        self._network = GrowingNetwork(self.growth, *self.shapes(), self._channels)
        return self._network

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of the task, plus `level` and `fade_in`."""
        level, fade_in = (0, 1.0) if self._network is None else self._network.now
        grown = {"level": torch.tensor(float(level)), "fade_in": torch.tensor(fade_in)}
        return {**self.task.metrics(outputs, batch), **grown}

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return the arguments that rebuild the network without the data."""
        input_shape, num_outputs = self.shapes()
        return {"input_shape": list(input_shape), "num_outputs": num_outputs}

    def __getattr__(self, name: str) -> Any:
        """Refuse optional methods of the task, which concern its own model."""
        raise AttributeError(name)


def _halvings(sides: Sequence[int]) -> int:
    """Return how often the sides can be halved to at least two pixels."""
    return max(0, min(sides).bit_length() - 2)
