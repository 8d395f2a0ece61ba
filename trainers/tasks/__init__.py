"""The built-in tasks by name; each is imported when it is used."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from orchestray.platform.errors import TaskError
from orchestray.platform.task import build_task, load_class
from orchestray.trainers.tasks.registry import TASKS

if TYPE_CHECKING:
    from orchestray.platform.task import Task, TaskSource

if __name__ != "orchestray.trainers.tasks":
    raise ImportError("import orchestray.trainers.tasks: under another name its modules would be loaded twice")


def resolve(name: str) -> type:
    """Return the class of a built-in task.

    Raises:
        TaskError: the name is unknown.
    """
    if name not in TASKS:
        close = get_close_matches(name, TASKS, n=1)
        nearest = f" (did you mean '{close[0]}'?)" if close else ""
        raise TaskError(
            f"there is no task {name!r}{nearest}: built in are {', '.join(TASKS)}; your own is "
            '"path/to/file.py:Class" or "module:Class"'
        )
    found: type = TASKS.find(name)
    return found


def build(source: TaskSource) -> Task:
    """Build any task, built in or a user's own; its model is quantized, and has several members, if the source says so.

    Raises:
        TaskError: the task cannot be built; the text gives the reason.
    """
    place, is_own, _ = source.type.rpartition(":")
    if is_own:
        from orchestray.trainers.core.arithmetic import kept_settings  # imports torch

        with kept_settings("import", place, source.file, source.source):
            load_class(source)
    task = build_task(source, resolve)
    if source.quantize is not None:
        from orchestray.trainers.few_bits.quantized_task import QuantizedTask

        task = QuantizedTask(task, source.quantize)
    if source.ensemble is not None:
        from orchestray.trainers.ensemble.together import EnsembleLossTask

        task = EnsembleLossTask(task, **source.ensemble)
    return task
