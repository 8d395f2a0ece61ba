"""A task whose model is a network found by a search; all else is the task's that the search began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from orchestray.platform.config.own_task import is_file_type
from orchestray.platform.config.tasks import TaskConfig
from orchestray.platform.data.source import open_source
from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import TaskSource
from orchestray.search.spaces.registry import SpaceSource, built
from orchestray.trainers import tasks

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from torch import Tensor, nn

    from orchestray.platform.task import Batch, Task
    from orchestray.search.spaces.base import ArchitectureSpace, Genome

TYPE: Final = "orchestray.search.spaces.searched_task:SearchedTask"
"""What `task.type` is in a config of such a task."""

_OF_THE_MODEL: Final = frozenset({"layers", "tensor_plan"})
"""Optional methods of a task that are about its own model, and say nothing of another."""


def searched_task_section(task: Mapping[str, Any], space: str | Mapping[str, Any], genome: Genome) -> dict[str, Any]:
    """The `task` section of a trial's config, with the text of every file it needs: it means the same on any machine,
    and after the files have moved.

    Args:
        task: the section of the task that the search began with.
        space: name, or the section `search.architecture`: `space`, and the space's own arguments.
        genome: of the network.

    Raises:
        OrchestrayError: a file cannot be read.
    """
    return {"type": TYPE, "genome": genome, **_sections(_task_source(task, {}), _space_source(space, {}))}


def _sections(task: TaskSource, space: SpaceSource) -> dict[str, Any]:
    """`task`, `space` and `files`, as `SearchedTask` takes them."""
    files = {}
    if task.file is not None and task.source is not None:
        files[task.file] = task.source
    if space.text is not None:
        files[space.name.rpartition(":")[0]] = space.text
    of_space = {"space": space.name, **space.arguments} if space.arguments else space.name
    sections = {"task": {"type": task.type, **task.arguments}, "space": of_space}
    return {**sections, "files": files} if files else sections


class SearchedTask:
    """A task with the network of a genome as its model.

    The network's inputs and outputs have the shapes that the first sample has and that the task's own model gives for
    it. Flat inputs are looked at as images by spaces that need them: 64 features as 8 x 8 (see `network.image_shape`).
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
        """Args:
        task: a `task` section: of a built-in task, or of one in a module or a file.
        space: name of a space, or {"space": name, ...} with the space's arguments.
        genome: of the network, in that space.
        files: text of the files named in `task` and `space`, by path; those not here are read.
        input_shape: of one sample; default: found in the data.
        num_outputs: default: found by the task's own model.

        Raises:
            OrchestrayError: the task or the space cannot be made.
        """
        known = dict(files or {})
        self._source = _task_source(task, known)
        self._space_source = _space_source(space, known)
        self.task: Task = tasks.build(self._source)
        self.space: ArchitectureSpace = self._space_source.make()
        self.genome = genome
        self._shapes = None if input_shape is None or num_outputs is None else (tuple(input_shape), num_outputs)

    def build_model(self) -> nn.Module:
        """The network of the genome.

        Raises:
            TaskError: it cannot be built, or the task is none for a space.
        """
        input_shape, num_outputs = self.shapes()
        network: nn.Module = built(self.space, self.genome, input_shape, num_outputs)
        return network

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
        return self.task.metrics(outputs, batch)

    def rebuild_arguments(self) -> dict[str, Any]:
        """Arguments with which the same model is built where neither the data nor the user's files are."""
        input_shape, num_outputs = self.shapes()
        found: dict[str, Any] = getattr(self.task, "rebuild_arguments", dict)()
        source = replace(self._source, arguments={**self._source.arguments, **found})
        sections = _sections(source, self._space_source)
        return {**sections, "input_shape": list(input_shape), "num_outputs": num_outputs}

    def __getattr__(self, name: str) -> Any:
        """The optional methods are there if the task has them, save those about its own model."""
        if name == "task" or name in _OF_THE_MODEL:
            raise AttributeError(name)
        return getattr(self.task, name)


def shapes_of(task: Task) -> tuple[tuple[int, ...], int]:
    """Shape of one sample's inputs, and the number of outputs of the task's own model for it.

    Raises:
        TaskError: the inputs are no tensor of numbers, or the outputs not [samples, outputs].
    """
    try:
        inputs = task.to_batch(open_source(task.dataset("train"), split="train").first_row())["inputs"]
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            outputs = task.build_model().eval()(inputs)
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(
            f"search.architecture: the shapes that a network must have were to be found by the task's own model on the "
            f"first row of its data, and that failed: {type(error).__name__}: {error}"
        ) from error
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


def _task_source(task: Any, files: Mapping[str, str]) -> TaskSource:
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise ConfigError(f"task.task: must be a task section with a type, got {task!r}")
    arguments = {name: value for name, value in task.items() if name != "type"}
    if not is_file_type(task["type"]):
        return TaskSource(task["type"], arguments)
    place, _, class_name = task["type"].rpartition(":")
    if place in files:
        return TaskSource(task["type"], arguments, place, files[place])
    read = TaskSource.from_config(TaskConfig(**task))
    return replace(read, type=f"{read.file}:{class_name}")


def _space_source(space: Any, files: Mapping[str, str]) -> SpaceSource:
    section = dict(space) if isinstance(space, Mapping) else {"space": space}
    name = section.pop("space", None)
    if not isinstance(name, str):
        raise ConfigError(f"task.space: must be the name of a space or have it under 'space', got {space!r}")
    return SpaceSource.read(name, section, files.get(name.rpartition(":")[0]))
