"""The improvement on a best score and on a front: it is its mean over draws, and its gradient is right."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.search.methods.hyper.improvement import Best, Front

FRONT = np.random.default_rng(0).normal(size=(12, 3))
MIXED = np.array([[1.0, 0.0, 0.0], [0.0, 0.3, 0.7]])
AIMS: dict[str, tuple[Best | Front, int]] = {
    "best": (Best(0.4), 1),
    "two": (Front(FRONT[:, :2], np.eye(2)), 2),
    "three mixed to two": (Front(FRONT, MIXED), 3),
}


def area(pairs: np.ndarray, corner: np.ndarray) -> float:
    """Return the area above a corner that pairs of scores dominate."""
    total, highest = 0.0, float(corner[1])
    for x, y in sorted(pairs[np.all(pairs > corner, axis=1)].tolist(), reverse=True):
        total += max(0.0, y - highest) * (x - float(corner[0]))
        highest = max(highest, y)
    return total


@pytest.mark.parametrize("name", AIMS)
def test_the_gradient_of_a_gain_is_its_finite_difference_near_and_far(name: str) -> None:
    aim, num_scores = AIMS[name]
    rng = np.random.default_rng(1)
    for shift in (0.0, -8.0, 3.0):
        means, deviations = rng.normal(size=num_scores) + shift, np.exp(rng.normal(0, 0.3, num_scores))
        gain, *slopes = aim.slopes(means, deviations)
        assert gain == pytest.approx(float(aim.gains(means[:, None], deviations[:, None])[0]))
        for place, slope in enumerate(slopes):
            for axis in range(num_scores):
                step = np.zeros((2, num_scores))
                step[place, axis] = 1e-6
                above, below = (aim.slopes(*(np.array([means, deviations]) + sign * step))[0] for sign in (1, -1))
                assert slope[axis] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-6)


def test_the_gain_on_a_front_is_the_mean_of_the_area_that_a_point_adds() -> None:
    pairs = FRONT[:, :2]
    front = Front(pairs, np.eye(2))
    corner = np.array([front._edges[0], front._floors[-1]])
    means, deviations = np.array([0.5, 0.8]), np.array([0.7, 0.4])
    drawn = means + deviations * np.random.default_rng(2).normal(size=(4000, 2))
    before = area(pairs, corner)
    added = np.mean([area(np.vstack([pairs, point]), corner) - before for point in drawn])
    assert np.exp(front.gains(means[:, None], deviations[:, None])) == pytest.approx(added, rel=0.05)
