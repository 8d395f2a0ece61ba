"""Statistics against the values themselves."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from orchestray.loadtest.tally import Latencies


def drawn(seed: int, num: int = 5000) -> list[float]:
    """Draw durations from some ten microseconds to minutes."""
    rng = random.Random(seed)
    return [min(600.0, max(2e-5, rng.lognormvariate(-4.0, 2.5))) for _ in range(num)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_a_quantile_is_the_nearest_rank(seed: int, share: float) -> None:
    values = drawn(seed)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert Latencies(np.array(values)).quantile_s(share) == exact


def test_mean_least_and_greatest_are_those_of_the_values() -> None:
    values = drawn(1)
    latencies = Latencies(np.array(values))
    assert latencies.mean_s == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert (latencies.num, latencies.min_s, latencies.max_s) == (len(values), min(values), max(values))


def test_of_nothing_there_are_no_numbers() -> None:
    nothing = Latencies(np.array([]))
    assert (nothing.num, nothing.sum_s) == (0, 0.0)
    assert all(math.isnan(value) for value in (nothing.mean_s, nothing.max_s, nothing.quantile_s(0.5)))
