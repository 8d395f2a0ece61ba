"""Steps to a goal by the size of the minibatch, each with its own best rate."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.survey.convergence.batch_sizes import steps_to_goal

CURVATURES = np.geomspace(0.01, 1.0, 30)
RATES = np.geomspace(1e-4, 3.0, 80).tolist()


def test_effects_of_data_parallelism_are_perfect_scaling_and_then_a_plateau() -> None:
    found = {2**k: steps_to_goal(CURVATURES, 2**k, RATES, goal=0.02) for k in range(15)}
    steps = {size: one.num_steps for size, one in found.items()}
    assert all(steps[2 * size] <= steps[size] for size in steps if size < 2**14)
    # Perfect scaling: four times the batch, a quarter of the steps.
    assert steps[4] == pytest.approx(steps[1] / 4, rel=0.1)
    # The plateau: eight times the batch saves nothing that counts.
    assert steps[2**14] > 0.95 * steps[2**11]
    assert steps[2**14] < steps[1] / 10
    # The best rate grows with the batch where scaling is perfect, and lies within those tried.
    assert found[4].lr == pytest.approx(4 * found[1].lr, rel=0.3)
    assert all(RATES[0] < one.lr < RATES[-1] for one in found.values())


def test_the_expected_loss_is_that_of_sampled_noise() -> None:
    rng, lr, size, num_steps = np.random.default_rng(0), 0.5, 16, 40
    weights = np.ones((20_000, len(CURVATURES)))
    for _ in range(num_steps):
        noise = rng.normal(size=weights.shape) * np.sqrt(CURVATURES / size)
        weights -= lr * (CURVATURES * weights + noise)
    loss = float((weights**2 @ CURVATURES).mean() / CURVATURES.sum())
    assert steps_to_goal(CURVATURES, size, [lr], goal=1.01 * loss).num_steps == pytest.approx(num_steps, abs=1)


def test_a_goal_that_no_rate_reaches_is_said() -> None:
    with pytest.raises(ValueError, match="no rate reaches"):
        steps_to_goal(CURVATURES, 1, [1e-6], goal=0.02, most_steps=5)
