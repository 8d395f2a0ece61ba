"""The callbacks of Ray Tune that a search's config names."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray.tune import Callback

from orchestray.platform.errors import ConfigError, TaskError
from orchestray.platform.task import TaskSource, load_class
from orchestray.search.engine.session import SearchError

if TYPE_CHECKING:
    from orchestray.search.config.schema import CallbackSection


def make_callbacks(sections: Sequence[CallbackSection]) -> list[Callback]:
    """Make the callbacks of a search.

    Raises:
        ConfigError: a class cannot be imported or made, or is not a callback of Tune.
    """
    return [_made(section, f"search.callbacks.{index}") for index, section in enumerate(sections)]


def check_callbacks(sections: Sequence[CallbackSection]) -> None:
    """Check the classes of the callbacks, before a search has a directory; none is made.

    Raises:
        ConfigError: a class cannot be imported, is not a callback of Tune, or does not take the arguments.
    """
    for index, section in enumerate(sections):
        _class_of(section, f"search.callbacks.{index}")


def _class_of(section: CallbackSection, key: str) -> type[Callback]:
    try:
        found = load_class(TaskSource.of_class(section.type, {}, noun="callback's"), key=key)
    except TaskError as error:
        raise ConfigError(f"config: {key}: {str(error).replace('the task file', 'the file')}") from error
    if not issubclass(found, Callback):
        raise ConfigError(
            f"config: {key}: {section.type} is not a ray.tune.Callback; wanted a subclass of it, or of LoggerCallback"
        )
    _check_arguments(found, section, key)
    return found


def _check_arguments(found: type[Callback], section: CallbackSection, key: str) -> None:
    try:
        wanted = inspect.signature(found)
    except ValueError:  # a class in C need not say what it takes
        return
    try:
        wanted.bind(**section.arguments)
    except TypeError as error:
        takes = ", ".join(wanted.parameters) or "none"
        raise ConfigError(f"config: {key}: {section.type}: {error} (its arguments: {takes})") from error


def _made(section: CallbackSection, key: str) -> Callback:
    found, arguments = _class_of(section, key), section.arguments
    try:
        return found(**arguments)
    except Exception as error:
        given = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        raise ConfigError(f"config: {key}: {section.type}({given}) failed: {type(error).__name__}: {error}") from error


def blame(error: Exception, callbacks: Sequence[Callback]) -> SearchError | None:
    """Return an error that names the callback in which another was raised; None if that was elsewhere."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = type(frame.f_locals.get("self"))
        if owner in map(type, callbacks):  # Tune may have copied the callback itself
            return SearchError(
                f"The callback {owner.__module__}:{owner.__qualname__} of search.callbacks failed: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Mend it or leave it out; --resume goes on."
            )
    return None
