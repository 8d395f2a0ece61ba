"""The descent lemma on a quadratic: how much a step of SGD lowers the loss in expectation.

For a loss f whose gradient changes by at most L times the distance, and an unbiased gradient g of it,

    E f(w - eta g) <= f(w) - eta |grad f(w)|^2 + eta^2 L/2 E |g|^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Descent:
    """The expected losses after each step, and their bounds, in the order of the steps."""

    losses: Values
    """Loss before each step, [steps]."""
    expected: Values
    """Mean loss after each step over all draws of its gradient, [steps]."""
    bounds: Values
    """Bound of the lemma on that, [steps]."""

    @property
    def holds(self) -> bool:
        """True if no mean is above its bound, up to rounding."""
        return bool((self.expected <= self.bounds + 1e-12 * np.abs(self.bounds)).all())


def descend(
    curvatures: Values, learning_rate: float, num_steps: int, num_draws: int = 10_000, seed: int = 0
) -> Descent:
    """Take steps on f(w) = 1/2 sum of c_i w_i^2 with noisy gradients, and average f over many draws of each step.

    Half of the draws have the noise of the other half with its sign turned, so that their mean is the gradient.

    Args:
        curvatures: the c_i, positive; the largest is L.
        learning_rate: eta.
        num_steps: steps; the next one begins where the first draw ends.
        num_draws: draws of the gradient at each step, an even number.
        seed: seed of the start and of the noise.
    """
    draw = np.random.default_rng(seed)
    smoothness = float(curvatures.max())
    w = draw.standard_normal(len(curvatures))
    losses, expected, bounds = [], [], []
    for _ in range(num_steps):
        loss, gradient = float(curvatures @ w**2) / 2, curvatures * w
        noise = draw.standard_normal((num_draws // 2, len(w)))
        drawn = gradient + np.concatenate([noise, -noise])
        after = w - learning_rate * drawn
        losses.append(loss)
        expected.append(float(np.mean(after**2 @ curvatures)) / 2)
        squares = float(np.mean((drawn**2).sum(axis=1)))
        bounds.append(loss - learning_rate * float(gradient @ gradient) + learning_rate**2 * smoothness / 2 * squares)
        w = after[0]
    return Descent(np.asarray(losses), np.asarray(expected), np.asarray(bounds))
