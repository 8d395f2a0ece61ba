"""The callbacks of Ray Tune that a search's config names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.tune import Callback

from orchestray.platform.errors import ConfigError, TaskError
from orchestray.platform.task import TaskSource, load_class


def make_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks of a search.

    Args:
        names: "package.module:Class" or "/path/to/file.py:Class"; each class is called without arguments.

    Raises:
        ConfigError: a class cannot be imported or made, or is not a callback of Tune.
    """
    return [_made(name, f"search.callbacks.{index}") for index, name in enumerate(names)]


def _made(name: str, key: str) -> Callback:
    try:
        made: Any = load_class(TaskSource.of_class(name, {}, noun="callback's"), key=key)()
    except TaskError as error:
        raise ConfigError(f"config: {key}: {str(error).replace('the task file', 'the file')}") from error
    except Exception as error:
        raise ConfigError(f"config: {key}: {name}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Callback):
        raise ConfigError(
            f"config: {key}: {name} is not a ray.tune.Callback; wanted a subclass of it, or of LoggerCallback"
        )
    return made
