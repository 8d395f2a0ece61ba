"""The regions of the minibatch size follow from the time of a step and from accuracies."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.convergence.batch_regions import StepTime, regions

TIME = StepTime(fixed_s=1e-3, sample_s=1e-5)


def test_samples_a_second_rise_to_a_limit_of_which_the_middle_size_has_half() -> None:
    speeds = [TIME.samples_per_s(2**k) for k in range(20)]
    assert speeds == sorted(speeds)
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=0.02)
    assert 0.99 * speeds[-1] < speeds[-2] < speeds[-1] < 1 / TIME.sample_s
    assert TIME.samples_per_s(100) == pytest.approx(0.5 / TIME.sample_s)
    assert TIME.half_speed_size == pytest.approx(100)


def test_the_time_of_a_step_is_the_line_through_the_times() -> None:
    found = StepTime.fitted([8, 64, 512], [TIME.step_s(size) for size in (8, 64, 512)])
    assert (found.fixed_s, found.sample_s) == pytest.approx((TIME.fixed_s, TIME.sample_s))
    assert StepTime.fitted([8, 64], [1.0, 1.0]).half_speed_size > 1e6  # a machine that no size makes busy


def test_a_size_is_too_small_below_half_of_the_speed_and_too_large_where_accuracy_is_lost() -> None:
    accuracies = {10: 0.97, 100: 0.95, 200: 0.96, 400: 0.98, 800: 0.965, 1600: 0.9}
    found = regions(accuracies, TIME, tolerance=0.02)
    # At 100 accuracy is low by chance: a larger size has it.
    assert found == {10: "A", 100: "B", 200: "B", 400: "B", 800: "B", 1600: "C"}
    assert regions(accuracies, TIME, tolerance=0.01) == {**found, 800: "C"}
    assert regions({10: 0.9, 20: 0.5}, TIME, tolerance=0.01) == {10: "A", 20: "A, C"}
