"""A task whose model computes with few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.few_bits.layers import quantize_layers

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.task import Task


class QuantizedTask(WrappedTask):
    """A task whose `build_model` quantizes the model of another task."""

    def __init__(self, task: Task, section: Mapping[str, Any]) -> None:
        """
        Args:
            task: the other task.
            section: keys of `train.quantize`.
        """
        super().__init__(task)
        self._section = section

    def build_model(self) -> nn.Module:
        """Return the task's model, quantized.

        Raises:
            ConfigError: it has no layer to quantize.
        """
        return quantize_layers(self.task.build_model(), self._section)
