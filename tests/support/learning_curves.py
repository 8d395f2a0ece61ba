"""Learning curves of several families, of which none is a grid point of the model that predicts them."""

from __future__ import annotations

import numpy as np


def draw_curves(seed: int, num_trials: int, num_steps: int, noise: float = 0.005) -> np.ndarray:
    """Draw accuracies, [num_trials, num_steps]: shifted powers, stretched exponentials and powers of logarithms."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    curves = np.empty((num_trials, num_steps))
    for trial in range(num_trials):
        final = rng.uniform(0.6, 0.98)
        gained = final - rng.uniform(0.05, 0.15)
        family = rng.integers(3)
        if family == 0:
            missing = (1 + steps * rng.uniform(0.02, 0.5)) ** -rng.uniform(0.5, 2)
        elif family == 1:
            missing = np.exp(-((steps / rng.uniform(3, 40)) ** rng.uniform(0.6, 1.3)))
        else:
            missing = 1 / np.log(np.e + steps * rng.uniform(0.1, 3)) ** rng.uniform(1, 3)
        curves[trial] = final - gained * missing
    return curves + rng.normal(0, noise, curves.shape)
