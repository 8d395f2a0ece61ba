"""What a process keeps from one trial to the next: tasks that were built, and data that was read."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from orchestray.platform.data.source import Source, TableSource, open_source, reading
from orchestray.trainers import tasks
from orchestray.trainers.consolidation.distillation import learned_from

if TYPE_CHECKING:
    import torch

    from orchestray.platform.task import Task, TaskSource
    from orchestray.trainers.replica.settings import ReplicaSettings

SEARCHED_TASK: Final = "orchestray.search.spaces.searched_task:SearchedTask"
_MOST_TASKS = 8
_MOST_TABLES = 4


class Shelf:
    """Tasks by what they were built from, and the data of each.

    Trials that differ in a task's arguments have a task each, and data of their own; networks of a search over
    architectures share the data of the task they are for. Of tasks and of tables the latest few are kept.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._sources: OrderedDict[tuple[str, str], Source] = OrderedDict()
        self._shapes: dict[str, tuple[tuple[int, ...], int]] = {}
        """Of the inputs and outputs of networks for a task, found once for all of a search's genomes."""

    def task(self, settings: ReplicaSettings, device: torch.device) -> Task:
        """The task of these settings.

        Raises:
            TaskError: it cannot be built.
        """
        key = _key(settings.task, settings.distill, settings.precision == "float64", str(device))
        if key not in self._tasks:
            double = settings.precision == "float64"
            self._tasks[key] = learned_from(self._build(settings.task), settings.distill, double=double, device=device)
        self._tasks.move_to_end(key)
        while len(self._tasks) > _MOST_TASKS:
            self._tasks.popitem(last=False)
        return self._tasks[key]

    def _build(self, source: TaskSource) -> Task:
        if source.type != SEARCHED_TASK or "num_outputs" in source.arguments:
            return tasks.build(source)
        key = _data_key(source)
        if key in self._shapes:
            input_shape, num_outputs = self._shapes[key]
            known = {"input_shape": list(input_shape), "num_outputs": num_outputs}
            return tasks.build(replace(source, arguments={**source.arguments, **known}))
        built: Any = tasks.build(source)
        self._shapes[key] = built.shapes()
        return cast("Task", built)

    def source(self, settings: ReplicaSettings, task: Task, split: str) -> Source:
        """The samples of a split of the task of these settings.

        Raises:
            DataError: they cannot be read.
        """
        key = (_data_key(settings.task), split)
        if key not in self._sources:
            with reading(f"the {split} data"):
                self._sources[key] = open_source(task.dataset(split), split=split)
        self._sources.move_to_end(key)
        tables = [known for known, source in self._sources.items() if isinstance(source, TableSource)]
        for known in tables[: max(0, len(tables) - _MOST_TABLES)]:
            del self._sources[known]
        return self._sources[key]


def _data_key(source: TaskSource) -> str:
    """What a task's data depends on, as far as is known: of a searched network, not the network."""
    if source.type == SEARCHED_TASK:
        return json.dumps(source.arguments["task"], sort_keys=True, default=str)
    return _key(source)


def _key(source: TaskSource, *rest: object) -> str:
    return json.dumps([source.to_json(), *rest], sort_keys=True, default=str)
