"""The check that the keys of `search.space` exist in the base config, which accepts their values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from orchestray.platform.config import overrides
from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.search.config.conditions import condition_problems, settings_under, space_conditions
from orchestray.search.config.dimensions import edges
from orchestray.search.config.trial import changed, fields_of_type
from orchestray.search.methods.conditions import around
from orchestray.trainers.config.schema import TrainConfig

_SET_ELSEWHERE = {
    "name": "names the run, and is given to each trial by the search",
    "train.steps": "is what search.budget says",
    "train.epochs": "is replaced by search.budget",
}


def path_problems(base: TrainConfig, dimensions: Mapping[str, Any], samples: int | None = None) -> Iterator[Problem]:
    """Yield the problems of the keys and values of a space.

    A value is a problem if the base config refuses it with all settings of the other keys: the base's own, and either
    end of their dimensions.

    Args:
        base: the base config.
        dimensions: dimensions of the space, by key.
        samples: samples of each trial, if its length is given in them.
    """
    known = {}
    for key, dimension in dimensions.items():
        path = f"search.space.{key}"
        if key in _SET_ELSEWHERE:
            yield Problem(path, f"cannot be searched: it {_SET_ELSEWHERE[key]}")
        elif not (_is_there(base, key) or _is_in_a_choice(key, dimensions) or _is_of_a_type(base, key, dimensions)):
            yield Problem(path, f"is no key of the base config{_hint(base, key)}")
        else:
            known[key] = dimension
    named = {other for dimension in dimensions.values() for other in dimension.when}
    of_conditions = list(condition_problems(base, dimensions, {other for other in named if _is_there(base, other)}))
    yield from of_conditions
    unclear = {problem.path.removeprefix("search.space.").partition(".when")[0] for problem in of_conditions}
    known = {key: dimension for key, dimension in known.items() if key not in unclear}
    conditions = space_conditions(base, known)
    of_base = _refusal(base, {}, None)  # which is refused by itself, whatever the values are
    lows, highs = ({key: edges(dimension)[end] for key, dimension in known.items()} for end in (0, -1))
    for key, dimension in known.items():
        settings = list(settings_under(key, known, conditions))
        for value in edges(dimension):
            points = [{**others, **under, key: value} for others in ({}, lows, highs) for under in settings]
            refusals = (_refusal(base, conditions.active(point), samples) for point in points)
            if found := _if_all_refuse(refusals, of_base):
                yield Problem(f"search.space.{key}", _text(key, value, found))
                break


def _if_all_refuse(refusals: Iterable[list[Problem]], of_base: Collection[Problem]) -> list[Problem]:
    """Return the problems of the first of some settings; empty if one of them has none that the base has not."""
    first: list[Problem] = []
    for refused in refusals:
        found = [problem for problem in refused if problem not in of_base]
        if not found:
            return []
        first = first or found
    return first


def _text(key: str, value: Any, found: list[Problem]) -> str:
    first = next((problem for problem in found if problem.path == key), found[0])
    where = "" if first.path == key else f"{first.path} "
    return f"the base config refuses the value {shown(value)}: {where}{first.text}"


def _refusal(base: TrainConfig, changes: Mapping[str, Any], samples: int | None) -> list[Problem]:
    made = changed(base, changes, samples=samples)
    return [] if isinstance(made, TrainConfig) else made


def _is_there(base: TrainConfig, key: str) -> bool:
    """Return True if a key can be set in the base config.

    Arguments of a user's own task are checked later, by its file. A mapping that has keys has no others.
    """
    place: Any = base
    names = key.split(".")
    while names:
        if isinstance(place, dict) and (inner := _key_in(place, names)) is not None:
            place, names = place[inner], names[inner.count(".") + 1 :]
            continue
        name = names.pop(0)
        if isinstance(place, BaseModel):
            if name not in type(place).model_fields and type(place).model_config.get("extra") != "allow":
                return False
            place = getattr(place, name, None)
        elif isinstance(place, list | tuple):
            if not name.isdecimal() or int(name) >= len(place):
                return False
            place = place[int(name)]
        elif place is None or place == {}:
            place = None
        else:  # a mapping that lacks the key, or a value without keys
            return False
    return True


def _is_in_a_choice(key: str, dimensions: Mapping[str, Any]) -> bool:
    """Return True if a key is in one of the values of a section that is searched as a whole, such as a longer list."""
    section = around(key, dimensions)
    values = () if section is None else getattr(dimensions[section], "values", ())
    keys = tuple(key.removeprefix(f"{section}.").split("."))
    return any(overrides.find(value, keys) is not None for value in values)


def _is_of_a_type(base: TrainConfig, key: str, dimensions: Mapping[str, Any]) -> bool:
    """Return True if a section has the key with one of the types that are searched."""
    section, _, name = key.rpartition(".")
    types = getattr(dimensions.get(f"{section}.type"), "values", ())
    return any(name in fields_of_type(base, section, one) for one in types)


def _key_in(mapping: Mapping[str, Any], names: list[str]) -> str | None:
    """Return the longest key of a mapping that a dotted key begins with; None: it has none of them."""
    keys = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((key for key in keys if key in mapping), None)


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
    section: Any = base
    for depth, parent in enumerate(parents):
        if isinstance(section, dict):
            return _hint_in(section, key.split(".")[depth:], ".".join(parents[:depth]))
        section = getattr(section, parent, None)
    if isinstance(section, dict):
        return _hint_in(section, key.split(".")[-1:], ".".join(parents))
    if not isinstance(section, BaseModel):
        return nearest(key, _keys(base)) or f"; it has {', '.join(type(base).model_fields)}"
    names = [*type(section).model_fields, *(section.model_extra or {})]
    place = ".".join(parents)
    close = nearest(key, [f"{place}.{name}" if place else name for name in names])
    is_meant = bool(nearest(key.rpartition(".")[2], names))
    return close if close and is_meant else f"; known in {place or 'it'}: {', '.join(sorted(names))}"


def _hint_in(mapping: Mapping[str, Any], names: list[str], place: str) -> str:
    """Return a hint on a key that a mapping of the user's lacks."""
    while isinstance(inner := mapping.get(found := _key_in(mapping, names) or ""), Mapping):
        mapping, names, place = inner, names[found.count(".") + 1 :], f"{place}.{found}"
    return nearest(".".join(names), mapping) or f"; known in {place}: {', '.join(sorted(mapping))}"
