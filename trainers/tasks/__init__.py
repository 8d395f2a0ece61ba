"""The built-in tasks, and how any task is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from orchestray.platform.task import build_task

if TYPE_CHECKING:
    from orchestray.platform.task import Task, TaskSource

_BUILT_IN = {
    "digits": "digits:Digits",
    "python_source": "python_source:PythonSource",
    "parquet": "parquet:ParquetTable",
}


def resolve(name: str) -> type:
    """The class of a built-in task; KeyError if there is none of that name."""
    module, _, class_name = _BUILT_IN[name].partition(":")
    found: type = getattr(import_module(f"orchestray.trainers.tasks.{module}"), class_name)
    return found


def build(source: TaskSource) -> Task:
    """Build a task, built-in or the user's own."""
    return build_task(source, resolve)
