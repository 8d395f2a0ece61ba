"""A copy's values are explored by the kind of their dimension, as 1,000 explorations show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.population.explore import explored
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform

NUM = 1_000


def counts(dimension: Dimension, value: Any, rule: Any = "perturb", **options: Any) -> Counter[Any]:
    """Return how often each value follows a value."""
    draws = np.random.default_rng(7)
    made = [explored(rule, {"key": dimension}, {"key": value}, draws, **options)["key"] for _ in range(NUM)]
    return Counter(round(one, 9) if isinstance(one, float) else one for one in made)


def about(part: float) -> Any:
    """Return the expected count of a part of all, within four standard deviations."""
    return pytest.approx(part * NUM, abs=4 * (part * (1 - part) * NUM) ** 0.5)


@pytest.mark.parametrize("dimension", [Binary(), Choice((False, True)), Choice(("a", "b")), Choice((2, 1))])
def test_each_of_two_values_without_an_order_stays_as_often_as_it_changes(dimension: Dimension) -> None:
    first, second = dimension.all_values() or ()
    for value in (first, second):
        assert counts(dimension, value) == {first: about(0.5), second: about(0.5)}


def test_values_without_an_order_are_all_as_likely() -> None:
    assert counts(Choice(("a", "b", "c", "d")), "a") == dict.fromkeys("abcd", about(0.25))


@pytest.mark.parametrize(
    ("value", "after"), [(2, {1: 0.5, 3: 0.5}), (1, {1: 0.5, 2: 0.5}), (4, {3: 0.5, 4: 0.5}), (3, {2: 0.5, 4: 0.5})]
)
def test_an_ordered_choice_moves_to_a_neighbour_or_stays_at_the_end(value: int, after: dict[int, float]) -> None:
    assert counts(Choice((1, 2, 3, 4)), value) == {one: about(part) for one, part in after.items()}


@pytest.mark.parametrize(
    ("dimension", "value", "after"),
    [
        (Uniform(0.0, 10.0), 5.0, {4.0: 0.5, 6.0: 0.5}),
        (Uniform(0.0, 10.0), 0.0, {2.0: 1.0}),
        (Uniform(0.0, 10.0), 10.0, {8.0: 1.0}),
        (Uniform(-5.0, 5.0), 0.0, {-2.0: 0.5, 2.0: 0.5}),
        (Uniform(-5.0, 5.0), -5.0, {-4.0: 0.5, -3.0: 0.5}),
        (Uniform(1.0, 11.0), 1.0, {1.2: 0.5, 3.0: 0.5}),
        (Uniform(0.0, 10.0), 9.0, {7.2: 0.5, 10.0: 0.5}),
        (Uniform(0.01, 1.0, is_log=True), 0.1, {0.08: 0.5, 0.12: 0.5}),
        (Uniform(0.01, 1.0, is_log=True), 0.01, {0.0125: 0.5, 0.012: 0.5}),
        (Uniform(0.01, 1.0, is_log=True), 1.0, {0.8: 0.5, round(1 / 1.2, 9): 0.5}),
        (Integer(0, 100), 50, {40: 0.5, 60: 0.5}),
        (Integer(0, 100), 0, {20: 1.0}),
        (Integer(0, 3), 0, {1: 1.0}),
        (Integer(1, 100), 2, {1: 0.5, 3: 0.5}),
        (Integer(1, 100), 1, {2: 1.0}),
        (Integer(1, 100), 100, {80: 1.0}),
        (Integer(-10, 10), 0, {-4: 0.5, 4: 0.5}),
    ],
)
def test_a_number_is_multiplied_and_moves_inwards_from_0_and_from_an_edge(
    dimension: Dimension, value: float, after: dict[float, float]
) -> None:
    assert counts(dimension, value) == {one: about(part) for one, part in after.items()}


def test_a_number_that_is_all_but_0_is_not_left_there() -> None:
    assert set(counts(Uniform(0.0, 1.0), 1e-9)) == {0.0, 0.200000001}


def test_a_factor_of_1_keeps_a_number() -> None:
    for dimension in (Uniform(0.0, 1.0), Integer(0, 9), Uniform(0.5, 1.0, is_log=True)):
        value = dimension.from_unit(0.0)
        assert counts(dimension, value, factors=(1.0,)) == {value: NUM}


@pytest.mark.parametrize(("rule", "stays"), [("resample", 0.75 + 0.25 / 2), ("both", 0.5)])
def test_values_are_drawn_again_with_their_probability(rule: str, stays: float) -> None:
    assert counts(Binary(), True, rule, resample_probability=0.25)[True] == about(stays)
