"""A task whose model is another task's, with Tucker factors instead of its convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from orchestray.platform.errors import CheckpointError, TaskError
from orchestray.trainers import tasks
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.tasks.nested import nested_source
from orchestray.trainers.tasks.thin_convolutions import tucker, tucker_layers

if TYPE_CHECKING:
    from orchestray.platform.task import TaskSource

TYPE: Final = "orchestray.trainers.shrink.tucker_task:TuckerTask"
"""Value of `task.type` in the config of such a task."""


class TuckerTask(WrappedTask):
    """A task with the model of another one, in which convolutions are replaced by `tucker_layers`.

    Those are replaced that then have fewer weights: of one group, with kernels larger than 1 x 1.
    """

    def __init__(self, task: Mapping[str, Any], rank: float, files: Mapping[str, str] | None = None) -> None:
        """
        Args:
            task: a `task` section: of a built-in task, or of one in a module or a file.
            rank: part of the channels that the cores have, above 0 to 1.
            files: text of the file named in `task` and of modules beside it, by path; missing ones are read.

        Raises:
            TaskError: the task cannot be created, or the rank is out of range.
        """
        if not 0 < rank <= 1:
            raise TaskError(f"task.rank must be above 0 and at most 1, got {rank}")
        self._source, self._rank = nested_source(task, files or {}), rank
        super().__init__(tasks.build(self._source))

    def build_model(self) -> nn.Module:
        return replaced(self.task.build_model(), lambda each: tucker_layers(each, self._rank))

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return the arguments that rebuild the model on a machine without the data and the user's files."""
        found: dict[str, Any] = getattr(self.task, "rebuild_arguments", dict)()
        return _arguments(replace(self._source, arguments={**self._source.arguments, **found}), self._rank)


def tucker_section(source: TaskSource, rank: float) -> dict[str, Any]:
    """Return the `task` section of a task with these factors; it holds the texts of its files."""
    return {"type": TYPE, **_arguments(source, rank)}


def in_factors(model: nn.Module, rank: float) -> nn.Module:
    """Replace the convolutions of a trained model by their Tucker decompositions, in place, and return the model.

    Args:
        model: model on the CPU.
        rank: part of the channels that the cores have, above 0 to 1.

    Raises:
        CheckpointError: no convolution would have fewer weights.
    """
    return replaced(model, lambda each: tucker(each, rank))


def replaced(model: nn.Module, layers_of: Callable[[nn.Conv2d], nn.Sequential]) -> nn.Module:
    """Replace the convolutions of a model that have fewer weights then, and return the model.

    Args:
        model: the model.
        layers_of: returns the layers instead of a convolution.

    Raises:
        CheckpointError: there are none.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Conv2d or child.groups > 1 or child.weight[0, 0].numel() == 1:
                continue
            layers = layers_of(child)
            if sum(map(_size, layers.parameters())) < sum(map(_size, child.parameters())):
                setattr(parent, name, layers)
                num_replaced += 1
    if not num_replaced:
        raise CheckpointError(
            "the model has no convolution that has fewer weights in Tucker factors of this rank: give a smaller rank, "
            "or leave it out"
        )
    return model


def _size(parameter: nn.Parameter) -> int:
    return parameter.numel()


def _arguments(source: TaskSource, rank: float) -> dict[str, Any]:
    files = {"files": source.texts} if source.texts else {}
    return {"task": {"type": source.type, **source.arguments}, "rank": rank, **files}
