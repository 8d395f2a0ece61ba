"""All tensors of a value, also those in objects that torch's pytrees take for leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def every_tensor_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: in lists, tuples, dictionaries, and attributes of other objects, also nested."""
    found: list[Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif id(value) not in seen and not isinstance(value, nn.Module | type):  # whose tensors are not outputs
        seen.add(id(value))  # objects may refer to each other
        if isinstance(value, Mapping):
            value = list(value.values())
        elif not isinstance(value, list | tuple):
            value = [getattr(value, name) for name in _attributes(value) if hasattr(value, name)]
        for item in value:
            _collect(item, found, seen)


def _attributes(value: Any) -> list[str]:
    """Return the names of an object's own attributes; a dataclass with slots has no dictionary of them."""
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return list(dict.fromkeys([*fields, *getattr(value, "__dict__", {})]))
