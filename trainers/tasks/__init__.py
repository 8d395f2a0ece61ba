"""The tasks that come along, by name; each is imported when it is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from orchestray.platform.errors import TaskError
from orchestray.platform.task import build_task

if TYPE_CHECKING:
    from orchestray.platform.task import Task, TaskSource

if __name__ != "orchestray.trainers.tasks":
    raise ImportError("import orchestray.trainers.tasks: under another name its modules would be loaded twice")

BUILT_IN = {
    "digits": ("orchestray.trainers.tasks.digits", "Digits"),
    "parquet": ("orchestray.trainers.tasks.parquet", "ParquetTable"),
    "python_source": ("orchestray.trainers.tasks.python_source", "PythonSource"),
}
"""Name of each task, with the module and the class."""


def resolve(name: str) -> type:
    """The class of a built-in task.

    Raises:
        TaskError: there is none of that name.
    """
    if name not in BUILT_IN:
        close = get_close_matches(name, BUILT_IN, n=1)
        nearest = f" (did you mean '{close[0]}'?)" if close else ""
        raise TaskError(
            f"there is no task {name!r}{nearest}: built in are {', '.join(BUILT_IN)}; your own is "
            '"path/to/file.py:Class" or "module:Class"'
        )
    module, class_name = BUILT_IN[name]
    found: type = getattr(import_module(module), class_name)
    return found


def build(source: TaskSource) -> Task:
    """Build any task, built in or a user's own.

    Raises:
        TaskError: it cannot be built; the text says why.
    """
    return build_task(source, resolve)
