"""The descent lemma holds at every step of SGD on a quadratic, in the mean over ten thousand draws."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.survey.convergence.descent_lemma import descend

CURVATURES = np.geomspace(0.1, 4.0, 12)


@pytest.mark.parametrize("learning_rate", [0.01, 0.1, 0.25, 0.6])
def test_descent_lemma_bound_holds_in_expectation_over_ten_thousand_draws_at_every_step(learning_rate: float) -> None:
    found = descend(CURVATURES, learning_rate, num_steps=40, num_draws=10_000)
    assert len(found.losses) == 40
    assert found.holds
    assert (found.expected < found.bounds).all()  # the curvatures differ, so that it is not tight


def test_it_is_tight_where_all_curvatures_are_the_largest() -> None:
    found = descend(np.full(5, 4.0), 0.1, num_steps=10)
    assert found.expected == pytest.approx(found.bounds, rel=1e-12)


def test_a_smaller_constant_than_the_largest_curvature_is_no_bound() -> None:
    found = descend(np.full(5, 4.0), 0.1, num_steps=10)
    gradient_squares = 2 * 4.0 * found.losses  # |grad f|^2 = c^2 w^2 = 2 c f
    too_low = found.bounds - 0.1**2 * (4.0 - 3.9) / 2 * gradient_squares
    assert (found.expected > too_low).all()
