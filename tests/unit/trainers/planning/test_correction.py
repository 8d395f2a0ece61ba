"""Predictions are corrected by what alike runs have shown, and the intervals hold as often as they say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from orchestray.trainers.planning.correction import _NOISE, Corrections, Traits

HERE = Traits("mine", "zero", "zero gradients")
ALIKE = (
    HERE,
    Traits("mine", "zero", "zero parameters"),
    Traits("mine", "pipeline", "pipeline 1f1b"),
    Traits("mine", "single", "single"),
    Traits("another", "single", "single"),
)
"""Runs that have less and less in common with the first."""


def test_without_runs_nothing_is_corrected_and_the_interval_is_widest() -> None:
    found = Corrections([], []).of(HERE)
    assert (found.factor, found.num_runs) == (1.0, 0)
    low, high = found.interval
    assert low == pytest.approx(1 / high)
    assert all(high > Corrections([each], [1.0]).of(HERE).interval[1] for each in ALIKE)


def test_the_more_runs_have_in_common_the_more_one_corrects_the_other() -> None:
    found = [Corrections([each], [2.0]).of(HERE) for each in ALIKE]
    factors, widths = [each.factor for each in found], [each.interval[1] for each in found]
    assert factors == sorted(factors, reverse=True)
    assert widths == sorted(widths)
    assert 1.0 < factors[-1] < 1.05 < 1.5 < factors[0] < 2.0


def test_many_equal_runs_correct_wholly() -> None:
    found = Corrections([HERE] * 400, [1.3] * 400).of(HERE)
    assert found.factor == pytest.approx(1.3, rel=0.002)
    assert math.log(found.interval[1]) == pytest.approx(1.2816 * math.sqrt(_NOISE), rel=0.01)


def test_a_run_that_took_a_hundred_times_as_long_counts_as_three_times() -> None:
    assert Corrections([HERE], [100.0]).of(HERE) == Corrections([HERE], [3.0]).of(HERE)


def test_only_the_last_runs_count() -> None:
    found = Corrections([HERE] * 510, [9.0] * 10 + [1.0] * 500).of(HERE)
    assert (found.factor, found.num_runs) == (pytest.approx(1.0), 500)


@pytest.mark.parametrize("num_runs", [0, 5, 40])
def test_the_interval_covers_four_fifths_of_runs_whose_effects_are_drawn(num_runs: int) -> None:
    dice, drawn = random.Random(num_runs), np.random.default_rng(num_runs)
    covered = []
    for _ in range(600):
        traits = [
            Traits(dice.choice("ab"), family, f"{family} {dice.choice('xy')}")
            for family in dice.choices(["zero", "pipeline", "single"], k=num_runs + 1)
        ]
        shared = np.array([[one.covariance(other) for other in traits] for one in traits])
        errors = drawn.multivariate_normal(np.zeros(len(traits)), shared + _NOISE * np.eye(len(traits)))
        found = Corrections(traits[:-1], [math.exp(each) for each in errors[:-1]]).of(traits[-1])
        covered.append(found.interval[0] <= math.exp(errors[-1]) / found.factor <= found.interval[1])
    assert 0.75 <= np.mean(covered) <= 0.85
