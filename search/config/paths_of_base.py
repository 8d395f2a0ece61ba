"""The check that the keys of `search.space` exist in the base config, which accepts their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel

from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.search.config.dimensions import edges
from orchestray.search.config.trial import changed
from orchestray.trainers.config.schema import TrainConfig

_SET_ELSEWHERE = {
    "name": "names the run, and is given to each trial by the search",
    "train.steps": "is what search.budget says",
    "train.epochs": "is replaced by search.budget",
}


def path_problems(base: TrainConfig, dimensions: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the keys and values of a space.

    A value is a problem if the base config refuses it with all settings of the other keys: the base's own, and either
    end of their dimensions.

    Args:
        base: the base config.
        dimensions: dimensions of the space, by key.
    """
    known = {}
    for key, dimension in dimensions.items():
        path = f"search.space.{key}"
        if key in _SET_ELSEWHERE:
            yield Problem(path, f"cannot be searched: it {_SET_ELSEWHERE[key]}")
        elif not _is_there(base, key):
            yield Problem(path, f"is no key of the base config{_hint(base, key)}")
        else:
            known[key] = dimension
    lows, highs = ({key: edges(dimension)[end] for key, dimension in known.items()} for end in (0, -1))
    for key, dimension in known.items():
        for value in edges(dimension):
            found = [_refusal(base, {**others, key: value}) for others in ({}, lows, highs)]
            if all(found):
                yield Problem(f"search.space.{key}", _text(key, value, found[0]))
                break


def _text(key: str, value: Any, found: list[Problem]) -> str:
    first = next((problem for problem in found if problem.path == key), found[0])
    where = "" if first.path == key else f"{first.path} "
    return f"the base config refuses the value {shown(value)}: {where}{first.text}"


def _refusal(base: TrainConfig, changes: Mapping[str, Any]) -> list[Problem]:
    made = changed(base, changes)
    return [] if isinstance(made, TrainConfig) else made


def _is_there(base: TrainConfig, key: str) -> bool:
    """Return True if the base config has a key; arguments of a user's own task are checked later, by its file."""
    place: Any = base
    for name in key.split("."):
        if isinstance(place, BaseModel):
            if name not in type(place).model_fields and type(place).model_config.get("extra") != "allow":
                return False
            place = getattr(place, name, None)
        elif isinstance(place, list | tuple):
            if not name.isdecimal() or int(name) >= len(place):
                return False
            place = place[int(name)]
        elif isinstance(place, dict):
            place = place.get(name)
        elif place is not None:
            return False
    return True


def _keys(section: BaseModel, path: str = "") -> Iterator[str]:
    """Yield every dotted key of a config, at all depths."""
    for name in [*type(section).model_fields, *(section.model_extra or {})]:
        value, key = getattr(section, name), f"{path}{name}"
        yield key
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{key}.")


def _hint(base: TrainConfig, key: str) -> str:
    """Return a hint: the nearest key, or the keys known at this place."""
    parents = key.split(".")[:-1]
    try:
        section = reduce(getattr, parents, base)
    except AttributeError:
        section = None
    if not isinstance(section, BaseModel):
        return nearest(key, _keys(base)) or f"; it has {', '.join(type(base).model_fields)}"
    names = [*type(section).model_fields, *(section.model_extra or {})]
    place = ".".join(parents)
    close = nearest(key, [f"{place}.{name}" if place else name for name in names])
    is_meant = bool(nearest(key.rpartition(".")[2], names))
    return close if close and is_meant else f"; known in {place or 'it'}: {', '.join(sorted(names))}"
