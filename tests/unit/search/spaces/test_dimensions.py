"""Dimensions: every value has a place in [0, 1], and every place a value."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.dimensions import (
    Binary,
    Choice,
    Dimension,
    Integer,
    Uniform,
    from_units,
    make_dimension,
)

DIMENSIONS: list[Dimension] = [
    Uniform(-2.0, 3.0),
    Uniform(1e-4, 1.0, is_log=True),
    Integer(1, 9),
    Integer(1, 1000, is_log=True),
    Choice(("a", "b", "c")),
    Choice((16, 32, 64)),
    Choice(([1, 2], None, {"type": "sgd"})),
    Choice((1, True, 0.0, False, 1.0, "1")),  # some are equal to Python
    Binary(),
]


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=repr)
def test_a_value_comes_back_from_its_place(dimension: Dimension) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        value = dimension.sample(rng)
        unit = dimension.to_unit(value)
        assert 0 <= unit <= 1
        back = dimension.from_unit(unit)
        assert back == (pytest.approx(value) if isinstance(value, float) else value)
        assert type(back) is type(value)


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=repr)
def test_the_ends_and_what_lies_beyond_them_are_values_too(dimension: Dimension) -> None:
    values = dimension.all_values()
    for unit in (0.0, 1.0):
        value = dimension.from_unit(unit)
        assert 0 <= dimension.to_unit(value) <= 1
        assert values is None or value in values


@pytest.mark.parametrize("dimension", [d for d in DIMENSIONS if d.num_values is not None], ids=repr)
def test_all_values_are_counted_each_once_and_all_are_drawn(dimension: Dimension) -> None:
    values = dimension.all_values()
    assert values is not None
    assert len(values) == dimension.num_values
    assert len({repr(value) for value in values}) == len(values)
    drawn = {repr(dimension.from_unit(unit)) for unit in np.linspace(0, 1, 200_001)}
    assert drawn == {repr(value) for value in values}


def test_integers_choices_and_flags_are_drawn_evenly_and_logarithms_by_decade() -> None:
    rng = np.random.default_rng(1)
    for dimension in (Integer(1, 9), Choice(("a", "b", "c")), Binary()):
        counts = Counter(dimension.sample(rng) for _ in range(9000))
        expected = 9000 / (dimension.num_values or 1)
        assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts.values())
    decades = Counter(math.floor(math.log10(Uniform(1e-4, 1.0, is_log=True).sample(rng))) for _ in range(4000))
    assert all(abs(decades[decade] - 1000) < 160 for decade in (-4, -3, -2, -1))


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=repr)
def test_a_perturbed_value_is_one_of_the_dimension_near_by(dimension: Dimension) -> None:
    rng = np.random.default_rng(2)
    values = dimension.all_values()
    for _ in range(200):
        value = dimension.sample(rng)
        moved = dimension.perturb(value, rng)
        if isinstance(dimension, Uniform):
            assert dimension.low <= moved <= dimension.high
            assert moved in (dimension.low, dimension.high) or moved / value == pytest.approx(
                0.8 if moved / value < 1 else 1.2
            )
        else:
            assert values is not None
            assert moved in values
    if isinstance(dimension, Integer):
        assert dimension.perturb(2, rng) != 2


def test_a_point_of_the_cube_has_its_axes_in_the_order_of_the_keys() -> None:
    space = {"b": Binary(), "a": Uniform(0.0, 10.0)}
    values = from_units(space, [0.9, 0.5])
    assert values == {"b": True, "a": 5.0}


def test_what_a_config_says_becomes_a_dimension() -> None:
    assert make_dimension("log_uniform", low=1e-3, high=1.0) == Uniform(1e-3, 1.0, is_log=True)
    assert make_dimension("uniform", low=0, high=1) == Uniform(0, 1)
    assert make_dimension("log_integer", low=1, high=64) == Integer(1, 64, is_log=True)
    assert make_dimension("integer", low=1, high=64) == Integer(1, 64)
    assert make_dimension("choice", values=[1, "a"]) == Choice((1, "a"))
    assert make_dimension("binary") == Binary()


def test_values_of_numpy_are_searched_as_pythons() -> None:
    widths = make_dimension("choice", values=np.array([16, 32]))
    assert widths == Choice((16, 32))
    assert {type(value) for value in widths.all_values() or ()} == {int}
    assert widths.is_ordered
    pairs = make_dimension("choice", values=[(np.int64(1), 2.5), {"a": np.array([1.0])}])
    assert repr(pairs) == repr(Choice(((1, 2.5), {"a": [1.0]})))
    assert make_dimension("uniform", low=np.float32(0), high=1) == Uniform(0.0, 1.0)


@pytest.mark.parametrize(
    ("type_", "arguments", "text"),
    [
        ("loguniform", {"low": 1e-4, "high": 1}, "there is no dimension 'loguniform'"),  # as Tune calls it
        ("uniform", {"low": 1, "high": 0}, "must be less than high"),
        ("integer", {"low": 3, "high": 3}, "for one value take a choice"),
        ("log_uniform", {"low": 0, "high": 1}, "must be > 0"),
        ("integer", {"low": 0.5, "high": 3}, "must be a whole number"),
        ("uniform", {"low": 0, "high": math.inf}, "must be a finite number"),
        ("uniform", {"low": -1e308, "high": 1e308}, "from -1e.308 to 1e.308 is wider .* take ends that are nearer"),
        ("log_uniform", {"low": 1e-300, "high": 1e300}, "is wider than floating-point numbers count"),
        ("integer", {"low": -(2**1023), "high": 2**1023}, "is wider than floating-point numbers count"),
        ("integer", {"low": 0, "high": 10**400}, "must be a whole number of at most 2e.308, got 1000*[.]"),
        ("uniform", {"lower": 0, "upper": 1}, "takes low and high, got lower, upper"),
        ("choice", {"values": []}, "one value or more"),
        ("uniform", {"low": False, "high": True}, "must be a finite number"),
        ("choice", {"values": [dict, list]}, "take its name"),
        ("choice", {"values": [{1: 0.1}]}, "take its name"),  # in a file its key would be a text
        ("choice", {"values": "abc"}, "must be a list"),
    ],
)
def test_a_dimension_that_would_be_searched_otherwise_than_it_is_meant_is_refused(
    type_: str, arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_dimension(type_, **arguments)
