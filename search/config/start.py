"""The first trials of a search as its config names them (`search.start`): completed by the base, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from orchestray.platform.config import overrides
from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.search.config.combinations import Refusal, tried_values
from orchestray.search.config.conditions import space_conditions
from orchestray.search.config.dimensions import own_value, why_outside
from orchestray.search.methods.conditions import ABSENT, Conditions, is_among
from orchestray.search.methods.space import Space
from orchestray.trainers.config.schema import TrainConfig

_MOST_TRIED = 256


def first_trial(base: TrainConfig, dimensions: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a first trial, completed by those of the base that are inside the space.

    Args:
        base: base config of the search.
        dimensions: dimensions of its space, by key of the base.
        values: values that the config names, each inside its dimension.

    Returns:
        The values as the dimensions have them, without those of keys that the trial does not have.
    """
    data = base.model_dump(mode="json")
    of_base = {key: overrides.find(data, tuple(key.split("."))) for key in dimensions}
    inside = {key: one for key, one in of_base.items() if why_outside(dimensions[key], one) is None}
    made = {key: own_value(dimensions[key], value) for key, value in {**inside, **values}.items()}
    return space_conditions(base, dimensions).active(made)


def start_problems(
    start: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    dimensions: Mapping[str, Any],
    base: TrainConfig | None,
    samples: int | None,
) -> Iterator[Problem]:
    """Yield the problems of first trials: those that are not in the space, come twice, or that no trial can have.

    Args:
        start: values that the config names.
        keys: keys of the space, with valid and invalid dimensions.
        dimensions: valid dimensions, by key.
        base: base config of the search; None: it is invalid.
        samples: samples of each trial, if its length is given in them.
    """
    for place, values in enumerate(start):
        path, is_inside = f"search.start.{place}", True
        for key, value in values.items():
            if key not in keys:
                yield Problem(f"{path}.{key}", f"is no key of search.space{nearest(key, keys)}")
            elif key in dimensions and (why := why_outside(dimensions[key], value)) is not None:
                text = f"{why}; widen search.space.{key}, or start with another value"
                yield Problem(f"{path}.{key}", text)
            elif key in dimensions:
                continue
            is_inside = False
        if (before := next(number for number, other in enumerate(start) if _are_same(values, other))) < place:
            yield Problem(path, f"is search.start.{before} as well: name each trial once")
        elif base is not None and is_inside and len(dimensions) == len(keys):
            yield from _problems_together(path, values, dimensions, base, samples)


def _are_same(values: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return values.keys() == other.keys() and all(is_among(value, (other[key],)) for key, value in values.items())


def _problems_together(
    path: str, values: Mapping[str, Any], dimensions: Mapping[str, Any], base: TrainConfig, samples: int | None
) -> Iterator[Problem]:
    """Yield the problems of values that are valid one by one."""
    first, conditions = first_trial(base, dimensions, values), space_conditions(base, dimensions)
    absent = [key for key in values if key not in first]
    for key in absent:
        yield Problem(f"{path}.{key}", _why_absent(key, first, conditions))
    if absent:
        return
    axes = {key: (first[key],) if key in first else tried_values(one) for key, one in dimensions.items()}
    nothing: Any = dict.fromkeys(dimensions)
    refusal = Refusal(base, samples)
    points = islice(Space(nothing, conditions).points(axes), _MOST_TRIED)
    found = [refusal.problem(point) for point in points]
    if found and found[0] is not None and all(found):
        yield Problem(
            path,
            f"the base config refuses a trial with these values: {found[0].path}: {found[0].text}; name other values, "
            "or say in search.space when a key exists (when)",
        )


def _why_absent(key: str, first: Mapping[str, Any], conditions: Conditions) -> str:
    """Return the sentence on a key that a first trial does not have, by the first condition that does not hold."""
    for other, allowed in conditions.when[key].items():
        has = conditions.value_of(other, first) if conditions.is_active(other, first) else ABSENT
        if not is_among(has, allowed):
            break
    listed = " or ".join(map(shown, allowed))
    found = "does not name it" if has is ABSENT else f"has {shown(has)}"
    text = f"exists only under {other}: {listed}, and this first trial {found}"
    return f"{text}; name such a value of it, or take the key out"
