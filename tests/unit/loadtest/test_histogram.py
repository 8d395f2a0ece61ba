"""The histogram against the values themselves."""

from __future__ import annotations

import json
import math
import random

import pytest

from orchestray.loadtest.histogram import Histogram


def filled(values: list[float]) -> Histogram:
    made = Histogram()
    for value in values:
        made.record(value)
    return made


def drawn(seed: int, num: int = 5000) -> list[float]:
    """Draw durations from some ten microseconds to minutes."""
    rng = random.Random(seed)
    return [min(600.0, max(2e-5, rng.lognormvariate(-4.0, 2.5))) for _ in range(num)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_a_quantile_is_the_nearest_rank_to_a_thousandth_or_a_microsecond(seed: int, share: float) -> None:
    values = drawn(seed)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert filled(values).quantile_s(share) == pytest.approx(exact, rel=1e-3, abs=1e-6)


def test_mean_least_and_greatest_are_exact() -> None:
    values = drawn(1)
    histogram = filled(values)
    assert histogram.mean_s == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert (histogram.min_s, histogram.max_s) == (min(values), max(values))


def test_two_added_up_are_that_of_all_values() -> None:
    one, other = drawn(1), drawn(2)
    together = filled(one)
    together.add(filled(other))
    both = filled([*one, *other])
    assert together.to_json() | {"sum_s": 0} == both.to_json() | {"sum_s": 0}
    assert together.sum_s == pytest.approx(both.sum_s, rel=1e-12)


def test_written_and_read_it_is_the_same() -> None:
    histogram = filled(drawn(3))
    again = Histogram.from_json(json.loads(json.dumps(histogram.to_json())))
    assert again.to_json() == histogram.to_json()
    assert again.num == histogram.num
    assert again.quantile_s(0.99) == histogram.quantile_s(0.99)


def test_an_empty_one_has_no_numbers() -> None:
    empty = Histogram.from_json(Histogram().to_json())
    assert math.isnan(empty.mean_s)
    assert math.isnan(empty.quantile_s(0.5))


def test_hours_cost_no_more_buckets_than_a_thousand_a_power_of_two() -> None:
    histogram = filled([2.0**power * (1 + step / 3000) for power in range(-20, 14) for step in range(3000)])
    assert len(histogram.to_json()["counts"]) <= 1024 * 35
