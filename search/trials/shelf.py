"""What a process keeps from one trial to the next: tasks that were built, and data that was read."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from orchestray.platform.data.source import Source, TableSource, open_source, reading
from orchestray.trainers import tasks
from orchestray.trainers.consolidation.distillation import learned_from

if TYPE_CHECKING:
    import torch

    from orchestray.platform.task import Task, TaskSource
    from orchestray.trainers.settings import ReplicaSettings

_MOST_TASKS = 8
_MOST_TABLES = 4


class Shelf:
    """Tasks by what they were built from, and the data of each.

    Trials that differ in a task's arguments have a task each; where those give the very same table, it is read once
    only if the task itself keeps it. Of tasks and of tables the latest few are kept.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._sources: OrderedDict[tuple[int, str], tuple[Task, Source]] = OrderedDict()

    def task(self, settings: ReplicaSettings, device: torch.device) -> Task:
        """The task of these settings.

        Raises:
            TaskError: it cannot be built.
        """
        key = _key(settings.task, settings.distill, settings.precision == "float64", str(device))
        if key not in self._tasks:
            built = tasks.build(settings.task)
            double = settings.precision == "float64"
            self._tasks[key] = learned_from(built, settings.distill, double=double, device=device)
        self._tasks.move_to_end(key)
        while len(self._tasks) > _MOST_TASKS:
            self._tasks.popitem(last=False)
        return self._tasks[key]

    def source(self, task: Task, split: str) -> Source:
        """The samples of a split of a task.

        Raises:
            DataError: they cannot be read.
        """
        key = (id(task), split)
        if key not in self._sources:
            with reading(f"the {split} data"):
                self._sources[key] = (task, open_source(task.dataset(split), split=split))
        self._sources.move_to_end(key)
        tables = [known for known, (_, source) in self._sources.items() if isinstance(source, TableSource)]
        for known in tables[: max(0, len(tables) - _MOST_TABLES)]:
            del self._sources[known]
        return self._sources[key][1]


def _key(source: TaskSource, *rest: object) -> str:
    return json.dumps([source.to_json(), *rest], sort_keys=True, default=str)
