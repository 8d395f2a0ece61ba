"""The task inside another task: a `task` section with the texts of the files that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestray.platform.config.paths import is_file_type
from orchestray.platform.errors import ConfigError
from orchestray.platform.task import TaskSource


def nested_source(task: Any, files: Mapping[str, str]) -> TaskSource:
    """Return the source of a task from its `task` section.

    Args:
        task: section of a built-in task, or of one in a module or a file.
        files: text of the file named in it and of modules beside that, by path; missing ones are read.

    Raises:
        ConfigError: it is not such a section.
        TaskError: a file cannot be read.
    """
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise ConfigError(f"task.task: must be a task section with a type, got {task!r}")
    arguments = {name: value for name, value in task.items() if name != "type"}
    if not is_file_type(task["type"]):
        return TaskSource(task["type"], arguments)
    class_name = task["type"].rpartition(":")[2]
    source = TaskSource.of_class(task["type"], arguments, known=files)
    return replace(source, type=f"{source.file}:{class_name}")
