"""A process-wide cache of built tasks and loaded data, shared by successive trials."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from orchestray.platform.data.endless import EndlessSource
from orchestray.platform.data.source import Source, TableSource, open_split
from orchestray.trainers import tasks
from orchestray.trainers.core.arithmetic import kept_settings
from orchestray.trainers.distill.distillation import with_distillation
from orchestray.trainers.saved.initial_weights import with_initial_weights

if TYPE_CHECKING:
    import torch

    from orchestray.platform.task import Task, TaskSource
    from orchestray.trainers.config.settings import ReplicaSettings

SEARCHED_TASK: Final = "orchestray.search.spaces.searched_task:SearchedTask"
_MOST_TASKS = 8
_MOST_TABLES = 4


class TaskCache:
    """A cache of tasks by their source, and of their data.

    Trials that differ in a task's arguments have separate tasks and data. The networks of an architecture search share
    the data of the underlying task. The most recently used tasks and tables are kept.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._sources: OrderedDict[tuple[str, str], Source] = OrderedDict()
        self._shapes: dict[str, tuple[tuple[int, ...], int]] = {}
        """Shapes of the inputs and outputs of networks for a task, found once for all genomes of a search."""

    def task(self, settings: ReplicaSettings, device: torch.device) -> Task:
        """Return the task of these settings.

        Raises:
            TaskError: it cannot be built.
        """
        initial = settings.initial
        double = initial.precision == "float64"
        key = _key(settings.task, settings.distill, {**vars(initial), "precision": double}, str(device))
        with kept_settings("task", key):
            if key not in self._tasks:
                task = with_initial_weights(self._build(settings.task), initial)
                self._tasks[key] = with_distillation(task, settings.distill, double=double, device=device)
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
        """Return the samples of a split of the task of these settings.

        Raises:
            DataError: they cannot be read.
        """
        # Trials of different lengths share what has an end.
        num_endless = settings.num_endless
        key = (_data_key(settings.task), split)
        if key not in self._sources:
            self._sources[key] = open_split(task, split, num_endless=num_endless)
        self._sources.move_to_end(key)
        tables = [known for known, source in self._sources.items() if isinstance(source, TableSource)]
        for known in tables[: max(0, len(tables) - _MOST_TABLES)]:
            del self._sources[known]
        found = self._sources[key]
        return EndlessSource(found.data, num_endless) if isinstance(found, EndlessSource) and num_endless else found


def _data_key(source: TaskSource) -> str:
    """Return a key for the data of a task: for a searched network, it ignores the network."""
    if source.type == SEARCHED_TASK:
        return json.dumps(source.arguments["task"], sort_keys=True, default=str)
    return _key(source)


def _key(source: TaskSource, *rest: object) -> str:
    return json.dumps([source.to_json(), *rest], sort_keys=True, default=str)
