"""Draws of compute times have the speeds and the slow steps that were asked for, and are those of their seed."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.survey.cluster.stragglers import Compute


def test_a_worker_keeps_its_speed_and_slow_steps_come_as_often_as_asked() -> None:
    drawn = Compute(2.0, speed_spread=0.2, slow_probability=0.1, slow_factor=5.0).draw(400, 300)
    ordinary = np.median(drawn, axis=0)
    ratios = drawn / ordinary
    assert set(np.unique(ratios.round(9)).tolist()) == {1.0, 5.0}
    assert (ratios > 2).mean() == pytest.approx(0.1, abs=0.005)
    assert np.log(ordinary / 2.0).std() == pytest.approx(0.2, rel=0.15)


def test_a_seed_fixes_the_draws_and_more_steps_leave_the_speeds_as_they_are() -> None:
    compute = Compute(1.0, 0.3, 0.1, 4.0, seed=7)
    assert (compute.draw(9, 5) == compute.draw(9, 5)).all()
    assert (compute.draw(9, 5) != Compute(1.0, 0.3, 0.1, 4.0, seed=8).draw(9, 5)).any()
    assert (compute.draw(20, 5)[:9] == compute.draw(9, 5)).all()


def test_even_workers_all_take_the_base() -> None:
    assert Compute(0.5).is_even
    assert (Compute(0.5).draw(3, 4) == 0.5).all()
    assert not Compute(0.5, speed_spread=0.1).is_even


@pytest.mark.parametrize("wrong", [{"base_s": -1}, {"speed_spread": -0.1}, {"slow_probability": 2}, {"slow_factor": 0}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="slow_factor at least 1"):
        Compute(**{"base_s": 1.0, **wrong})
