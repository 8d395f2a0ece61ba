"""The conditions under which keys of a search's space exist, as its config has them, and the rules for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from orchestray.platform.config import overrides
from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.search.config.dimensions import edges, why_outside
from orchestray.search.methods.conditions import Conditions, around, conditions_of, is_among
from orchestray.trainers.config.schema import TrainConfig

_MOST_SETTINGS = 16


def space_conditions(base: TrainConfig, dimensions: Mapping[str, Any]) -> Conditions:
    """Return the conditions of a space; none if they go round in a circle, which `condition_problems` reports.

    Args:
        base: base config of the search.
        dimensions: dimensions of its space, by key of the base.
    """
    when = {key: dimension.when for key, dimension in dimensions.items() if dimension.when}
    named = {other for given in when.values() for other in given if other not in dimensions}
    data = base.model_dump(mode="json") if named else {}
    conditions = conditions_of(when, {other: overrides.find(data, tuple(other.split("."))) for other in named})
    return Conditions() if _circle(conditions, dimensions) else conditions


def condition_problems(base: TrainConfig, dimensions: Mapping[str, Any], known: set[str]) -> Iterator[Problem]:
    """Yield the problems of the conditions of a space.

    Args:
        base: base config of the search.
        dimensions: dimensions of its space, by key of the base.
        known: keys in conditions that the base has.
    """
    when = {key: dimension.when for key, dimension in dimensions.items() if dimension.when}
    data = base.model_dump(mode="json") if when else {}
    for key, given in when.items():
        for other, value in given.items():
            path, allowed = f"search.space.{key}.when.{other}", _listed(value)
            if other not in dimensions and other not in known:
                yield Problem(path, f"is no key of the space or the base config{nearest(other, dimensions)}")
            elif not allowed:
                yield Problem(path, "must have one value or more, under which the key exists; it has none")
            elif other in dimensions:
                outside = next(filter(None, (why_outside(dimensions[other], one) for one in allowed)), None)
                if outside is not None:
                    yield Problem(path, f"{outside}, which is what search.space says of {other}")
            elif around(other, dimensions) is None and not is_among(
                found := overrides.find(data, tuple(other.split("."))), allowed
            ):
                text = f"never holds: the base has {shown(found)}, and the space does not change it"
                yield Problem(path, text)
    if circle := _circle(conditions_of(when, {}), dimensions):
        yield Problem(f"search.space.{circle.partition(' ')[0]}.when", f"goes round in a circle: {circle}")


def settings_under(key: str, dimensions: Mapping[str, Any], conditions: Conditions) -> Iterator[dict[str, Any]]:
    """Yield some values of other keys under which a key exists; an empty mapping if it has no conditions.

    Args:
        key: key of the space.
        dimensions: dimensions of the space, by key.
        conditions: conditions of its keys.
    """
    options: list[list[dict[str, Any]]] = []
    for other, allowed in conditions.when.get(key, {}).items():
        parent = other if other in dimensions else around(other, dimensions)
        if parent is None:
            continue
        values = [*(allowed if parent == other else ()), *edges(dimensions[parent])]
        fitting = [value for value in values if is_among(conditions.value_of(other, {parent: value}), allowed)]
        outer = next(settings_under(parent, dimensions, conditions), {})
        options.append([{**outer, parent: value} for value in fitting])
    for chosen in islice(product(*options), _MOST_SETTINGS):
        yield {name: value for one in chosen for name, value in one.items()}


def _circle(conditions: Conditions, dimensions: Mapping[str, Any]) -> str | None:
    """Return keys that depend on each other in a circle, as a text; None if there are none."""
    try:
        conditions.order(dimensions)
    except ValueError as error:
        return str(error)
    return None


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
