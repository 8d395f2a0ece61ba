"""Predictions are corrected by what alike runs have shown, and the intervals hold as often as they say."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest

from orchestray.trainers.planning.correction import _NOISE, HOGWILD, SINGLE, Corrections, Traits

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


def test_schemes_that_send_no_messages_correct_each_other_more_than_those_that_do() -> None:
    hogwild = Traits("mine", HOGWILD, "hogwild asynchronous shared_memory")
    single, server = Traits("mine", SINGLE, "single none"), Traits("mine", "parameter_server", "parameter_server stale")
    factors = [Corrections([each], [2.0]).of(hogwild).factor for each in (single, server)]
    assert factors[0] > factors[1] > 1.0


def test_many_equal_runs_correct_wholly() -> None:
    found = Corrections([HERE] * 400, [1.3] * 400).of(HERE)
    assert found.factor == pytest.approx(1.3, rel=0.002)
    assert found.interval == pytest.approx((1.0, 1.0), rel=0.002)  # whatever spread runs have elsewhere


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
        errors = drawn.multivariate_normal(
            np.zeros(len(traits)), shared + _NOISE * np.eye(len(traits)), method="cholesky"
        )
        found = Corrections(traits[:-1], [math.exp(each) for each in errors[:-1]]).of(traits[-1])
        covered.append(found.interval[0] <= math.exp(errors[-1]) / found.factor <= found.interval[1])
    assert 0.75 <= np.mean(covered) <= 0.85


@pytest.mark.parametrize(("num_runs", "spread"), [(6, 0.01), (6, 0.2), (15, 0.05), (60, 0.01), (60, 0.2)])
def test_the_interval_covers_four_fifths_whatever_the_spread_of_this_machines_runs(
    num_runs: int, spread: float
) -> None:
    covered = covered_parts({"zero": spread, "pipeline": spread}, num_runs)
    assert 0.75 <= np.mean([*covered.values()]) <= 0.85


def test_families_of_many_runs_have_each_the_width_of_their_own_errors() -> None:
    covered = covered_parts({"zero": 0.02, "pipeline": 0.1}, 60)
    assert all(0.75 <= part <= 0.85 for part in covered.values()), covered


def test_a_task_that_was_never_run_has_no_interval_narrower_than_tasks_differ() -> None:
    steady = Corrections([HERE] * 30, [1.0] * 30)
    for traits in (HERE, ALIKE[-1]):
        new = Traits("new", traits.family, traits.scheme)
        assert steady.of(new).interval[1] > 1.15 > 1.01 > steady.of(HERE).interval[1]


def covered_parts(spreads: Mapping[str, float], num_runs: int) -> dict[str, float]:
    """Return how often the interval of a run of each family held; a family's errors have a normal distribution."""
    drawn = np.random.default_rng(num_runs)
    covered: dict[str, list[bool]] = {family: [] for family in spreads}
    for number in range(800):
        families = [*drawn.choice([*spreads], size=num_runs), [*spreads][number % len(spreads)]]
        traits = [Traits("mine", family, family) for family in families]
        ratios = [math.exp(0.1 + drawn.normal(0.0, spreads[family])) for family in families]
        found = Corrections(traits[:-1], ratios[:-1]).of(traits[-1])
        low, high = found.interval
        covered[families[-1]].append(low <= ratios[-1] / found.factor <= high)
    return {family: float(np.mean(held)) for family, held in covered.items()}
