"""The trackers by name, and users' own. Imports none of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestray.platform.config.problems import Problem, nearest
from orchestray.platform.errors import ConfigError, TaskError
from orchestray.platform.task import TaskSource, load_class
from orchestray.trainers.trackers.base import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.trackers.base import Tracker

    Make = Callable[[Path], Tracker]

_HERE = "orchestray.trainers.trackers"
TRACKERS = {
    "mlflow": (f"{_HERE}.mlflow_tracker:MlflowTracker", "mlflow-skinny"),
    "wandb": (f"{_HERE}.wandb_tracker:WandbTracker", "wandb"),
    "trackio": (f"{_HERE}.trackio_tracker:TrackioTracker", "trackio"),
}
"""Class of each tracker, and the package that it needs, whose module has the tracker's name."""


def problems_of(names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each name that is neither a tracker's nor a class's."""
    for index, name in enumerate(names):
        if name not in TRACKERS and ":" not in name:
            there_are = f'built in are {", ".join(TRACKERS)}; your own is "path/to/file.py:Class" or "module:Class"'
            yield Problem(f"trackers.{index}", f"there is no tracker {name!r}{nearest(name, TRACKERS)} ({there_are})")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        yield Problem("trackers", f"{', '.join(twice)} is there twice")


def makers(names: Sequence[str]) -> list[tuple[str, Make]]:
    """Return the name of each tracker, and the function that makes it for a run's directory.

    Args:
        names: keys of `TRACKERS`, "package.module:Class" or "/path/to/file.py:Class".

    Raises:
        ConfigError: a package is missing, or a class is not a tracker.
    """
    return [(name, _named(name) if name in TRACKERS else _own(name)) for name in names]


def _named(name: str) -> Make:
    place, package = TRACKERS[name]
    if find_spec(name) is None:
        raise ConfigError(
            f"config: trackers: {name} needs the package {package}, which is not installed where this command runs: "
            f"pip install {package}, or orchestray[{name}]"
        )
    module, _, class_name = place.partition(":")

    def make(directory: Path) -> Tracker:
        made: Tracker = getattr(import_module(module), class_name)(directory)
        return made

    return make


def _own(name: str) -> Make:
    try:
        own: Any = load_class(TaskSource.of_class(name, {}, noun="tracker's"), key="trackers")()
    except TaskError as error:
        raise ConfigError(f"config: trackers: {str(error).replace('the task file', 'the file')}") from error
    except Exception as error:
        raise ConfigError(f"config: trackers: {name}() failed: {type(error).__name__}: {error}") from error
    for method, count in METHODS.items():
        if not _takes(getattr(own, method, None), count):
            raise ConfigError(
                f"config: trackers: {name} is not a tracker: it needs start(config, name, resumed), "
                f"log(metrics, step) and finish(status), and {method} is missing or takes other arguments"
            )
    return lambda _directory: cast("Tracker", own)


def _takes(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True
