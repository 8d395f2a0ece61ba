"""A view of a config for the rules between keys, which refuses to return values that have problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from operator import attrgetter
from typing import Any

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.schema import TrainConfig


class Unusable(Exception):  # noqa: N818 - not an error: it ends a rule that cannot be checked
    """A signal that a rule read a value that has a problem of its own."""


class View:
    """The values of a config, some of which may be unusable."""

    def __init__(self, config: TrainConfig, unusable: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._unusable = unusable

    def __call__(self, path: str) -> Any:
        """Return the value at a dotted path.

        Raises:
            Unusable: the value, something in it, or a section around it has a problem, or this section is not there.
        """
        for bad in self._unusable:
            if f"{bad}.".startswith(f"{path}.") or f"{path}.".startswith(f"{bad}."):
                raise Unusable
        try:
            return _getter(path)(self._config)
        except AttributeError:
            return reduce(_entry, path.split("."), self._config)


_getter = lru_cache(attrgetter)
"""The rules read the same paths of config after config."""


def _entry(section: Any, key: str) -> Any:
    if section is None:
        raise Unusable
    return getattr(section, key)


Rule = Callable[[View], Iterator[Problem]]
