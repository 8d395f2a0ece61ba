"""A task whose model is a network found by a search; everything else comes from the search's original task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from orchestray.platform.data.source import first_row
from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import TaskSource
from orchestray.search.spaces.registry import SpaceSource, built
from orchestray.trainers import tasks
from orchestray.trainers.core.inputs import call, described, inputs_of
from orchestray.trainers.core.wrapped_task import WrappedTask
from orchestray.trainers.tasks.nested import nested_source

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.task import Task
    from orchestray.search.spaces.architectures.base import ArchitectureSpace, Genome

TYPE: Final = "orchestray.search.spaces.searched_task:SearchedTask"
"""Value of `task.type` in the config of such a task."""

_OF_THE_MODEL: Final = frozenset({"layers", "tensor_plan", "export_files"})
"""Optional methods of a task that concern only its own model."""


def searched_task_section(task: Mapping[str, Any], space: str | Mapping[str, Any], genome: Genome) -> dict[str, Any]:
    """Return the `task` section of a trial's config, with the text of every file it needs.

    It works on any machine, and after the files have moved.

    Args:
        task: section of the search's original task.
        space: name, or the section `search.architecture`: `space`, and the space's own arguments.
        genome: genome of the network.

    Raises:
        OrchestrayError: a file cannot be read.
    """
    return {"type": TYPE, "genome": genome, **_sections(nested_source(task, {}), _space_source(space, {}))}


def _sections(task: TaskSource, space: SpaceSource) -> dict[str, Any]:
    """Return `task`, `space` and `files` as `SearchedTask` takes them."""
    files: dict[str, str] = {}
    if task.file is not None and task.source is not None:
        files |= {task.file: task.source, **task.modules}
    if space.text is not None:
        files |= {space.name.rpartition(":")[0]: space.text, **space.modules}
    of_space = {"space": space.name, **space.arguments} if space.arguments else space.name
    sections = {"task": {"type": task.type, **task.arguments}, "space": of_space}
    return {**sections, "files": files} if files else sections


class RebuiltTask(WrappedTask):
    """A task with a network instead of its own model, which depends on the shapes of inputs and outputs."""

    def __init__(self, task: Task, input_shape: Sequence[int] | None, num_outputs: int | None) -> None:
        """
        Args:
            task: task with the data, the loss and the metrics.
            input_shape: shape of one sample; None: found in the data.
            num_outputs: number of outputs; None: found with the task's own model.
        """
        super().__init__(task)
        self._shapes = None if input_shape is None or num_outputs is None else (tuple(input_shape), num_outputs)

    def shapes(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of one sample's inputs, and the number of outputs."""
        if self._shapes is None:
            self._shapes = shapes_of(self.task)
        return self._shapes


class SearchedTask(RebuiltTask):
    """A task with the network of a genome as its model.

    The input shape of the network is that of the first sample, and its number of outputs that of the task's own model.
    Spaces of image networks reshape flat inputs to images: 64 features to 8 x 8 (see `network.image_shape`).
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        space: str | Mapping[str, Any],
        genome: Genome,
        files: Mapping[str, str] | None = None,
        input_shape: Sequence[int] | None = None,
        num_outputs: int | None = None,
    ) -> None:
        """
        Args:
            task: a `task` section: of a built-in task, or of one in a module or a file.
            space: name of a space, or {"space": name, ...} with the space's arguments.
            genome: genome of the network, in that space.
            files: text of the files named in `task` and `space` and of modules beside them, by path; missing ones are
                read.
            input_shape: shape of one sample; default: found in the data.
            num_outputs: number of outputs; default: found with the task's own model.

        Raises:
            OrchestrayError: the task or the space cannot be created.
        """
        known = dict(files or {})
        self._source = nested_source(task, known)
        self._space_source = _space_source(space, known)
        super().__init__(tasks.build(self._source), input_shape, num_outputs)
        self.space: ArchitectureSpace = self._space_source.make()
        self.genome = genome

    def build_model(self) -> nn.Module:
        """Build the network of the genome.

        Raises:
            TaskError: it cannot be built, or the task does not suit a space.
        """
        input_shape, num_outputs = self.shapes()
        network: nn.Module = built(self.space, self.genome, input_shape, num_outputs)
        return network

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return the arguments that rebuild the model on a machine without the data and the user's files."""
        input_shape, num_outputs = self.shapes()
        found: dict[str, Any] = getattr(self.task, "rebuild_arguments", dict)()
        source = replace(self._source, arguments={**self._source.arguments, **found})
        sections = _sections(source, self._space_source)
        return {**sections, "input_shape": list(input_shape), "num_outputs": num_outputs}

    def __getattr__(self, name: str) -> Any:
        """Return an optional method of the task, except those that concern its own model."""
        if name in _OF_THE_MODEL:
            raise AttributeError(name)
        return super().__getattr__(name)


def shapes_of(task: Task) -> tuple[tuple[int, ...], int]:
    """Return the shape of one sample's inputs, and the number of outputs of the task's own model.

    Raises:
        TaskError: the inputs are not a floating-point tensor, or the outputs not [samples, outputs].
    """
    try:
        inputs = inputs_of(task.to_batch(first_row(task)))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            outputs = call(task.build_model().eval(), inputs)
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(
            f"search.architecture: the shapes that a network must have were to be found by the task's own model on the "
            f"first row of its data, and that failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(inputs, torch.Tensor):
        raise TaskError(
            f"search.architecture: networks of a space take one tensor, and this task's inputs are {described(inputs)}"
        )
    if not inputs.is_floating_point():
        raise TaskError(
            f"search.architecture: networks of a space take numbers, and this task's inputs are {inputs.dtype}; "
            "a task of one's own can make floating point numbers of them in to_batch"
        )
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
        shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise TaskError(
            "search.architecture: networks of a space give outputs of shape [samples, outputs], and the task's own "
            f"model gives {shape} for one sample"
        )
    return tuple(inputs.shape[1:]), int(outputs.shape[1])


def _space_source(space: Any, files: Mapping[str, str]) -> SpaceSource:
    section = dict(space) if isinstance(space, Mapping) else {"space": space}
    name = section.pop("space", None)
    if not isinstance(name, str):
        raise ConfigError(f"task.space: must be the name of a space or have it under 'space', got {space!r}")
    return SpaceSource.read(name, section, files)
