"""Names that a user's class has in its attributes. Does not import torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestray.platform.errors import TaskError


def listed_names(value: Any, key: str = "class_names") -> list[Any]:
    """Return the names in an attribute, in their order.

    Args:
        value: a list, or an array, a tensor or an index of pandas; or a mapping of 0, 1, ... to the names, as Hugging
            Face's `id2label`; None: there are none.
        key: name of the attribute, for errors.

    Raises:
        TaskError: it is something else: a set has no order, and a text is one name.
    """
    if hasattr(value, "tolist"):  # of numpy, pandas and torch
        value = value.tolist()
    if value is None:
        return []
    if isinstance(value, Mapping):
        numbered = {str(number): name for number, name in value.items()}
        if numbered.keys() == {*map(str, range(len(value)))}:
            value = [numbered[str(number)] for number in range(len(value))]
    if not isinstance(value, list | tuple | range):
        raise TaskError(f"{key} must be a list of names in their order, got a {type(value).__name__}")
    return [each.item() if hasattr(each, "item") else each for each in value]


def feature_counts(value: Any) -> dict[str, int]:
    """Return the numbers that each name in `feature_names` has: of a list, one each.

    Raises:
        TaskError: it is neither a list nor a mapping, or a name comes twice.
    """
    if isinstance(value, Mapping):
        return {str(name): count for name, count in value.items()}
    names = [str(name) for name in listed_names(value, "feature_names")]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise TaskError(f"feature_names must have each name once, got {twice[0]!r} {names.count(twice[0])} times")
    return dict.fromkeys(names, 1)


def lower_names(value: Any) -> list[str]:
    """Return the metrics in `lower_is_better`, in which the order means nothing: a text is one.

    Raises:
        TaskError: it is not a list of names.
    """
    if isinstance(value, str):
        return [value]
    return listed_names(sorted(value) if isinstance(value, set | frozenset) else value, "lower_is_better")


_READ: Mapping[str, Callable[[Any], object]] = {
    "class_names": listed_names,
    "feature_names": feature_counts,
    "lower_is_better": lower_names,
}


def problems_of_names(task: object) -> Iterator[str]:
    """Yield a sentence on each attribute that is not a list; properties are left out, as they may read data."""
    for key, read in _READ.items():
        value = inspect.getattr_static(task, key, None)
        if inspect.isdatadescriptor(value) or isinstance(value, functools.cached_property):
            continue
        try:
            read(value)
        except TaskError as error:
            yield str(error)
