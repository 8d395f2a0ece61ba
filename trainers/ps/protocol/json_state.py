"""States made of dataclasses as JSON values, and back: for copies of a server, and for its snapshots on disk."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, TypeAdapter

Numbers = Annotated[set[int], PlainSerializer(sorted)]
"""A set whose JSON is the same whatever the order in which it was filled."""
_State = TypeVar("_State")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def to_json(state: Any) -> Any:
    """Return a dataclass as JSON values."""
    return _adapter(type(state)).dump_python(state, mode="json")


def from_json(kind: type[_State], value: Any) -> _State:
    """Return the object of this class that `to_json` described."""
    made: _State = _adapter(kind).validate_python(value)
    return made


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
