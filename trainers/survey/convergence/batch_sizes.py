"""Steps to a goal by the size of the minibatch, with the learning rate tuned for each size.

After Shallue et al., "Measuring the Effects of Data Parallelism on Neural Network Training" (2019): twice the batch
first halves the steps (perfect scaling), then helps less and less, until it does not help at all. The task is the noisy
quadratic of Zhang et al., "Which Algorithmic Choices Matter at Which Batch Sizes?" (2019), in exact expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class StepsToGoal:
    """The fewest steps of a minibatch of one size to the goal."""

    batch_size: int
    lr: float
    """Rate that needs the fewest steps."""
    num_steps: int

    @property
    def num_samples(self) -> int:
        """Number of samples that these steps use."""
        return self.batch_size * self.num_steps


def steps_to_goal(
    curvatures: Values, batch_size: int, rates: Sequence[float], *, goal: float, most_steps: int = 100_000
) -> StepsToGoal:
    """Return the fewest steps of SGD with which the expected loss reaches a goal.

    The loss is the sum of h w^2 / 2 over the curvatures h, from w = 1 on. A sample's gradient has the variance h. So
    the expectation of w^2 becomes (1 - lr h)^2 w^2 + lr^2 h / batch_size in a step.

    Args:
        curvatures: h of each weight, [weights].
        batch_size: samples of a minibatch.
        rates: constant learning rates to choose from.
        goal: expected loss to reach, as a part of the first one.
        most_steps: number of steps after which the search is given up.

    Raises:
        ValueError: no rate reaches the goal.
    """
    tried = np.asarray(rates)[:, None]
    kept, added = (1.0 - tried * curvatures) ** 2, tried**2 * curvatures / batch_size
    squares = np.ones((len(rates), len(curvatures)))
    for step in range(1, most_steps + 1):
        squares = np.minimum(kept * squares + added, 1e9)  # a rate that diverges stays out of the way
        losses = squares @ curvatures / curvatures.sum()
        if losses.min() <= goal:
            return StepsToGoal(batch_size, float(rates[int(losses.argmin())]), step)
    raise ValueError(f"no rate reaches {goal:g} of the first loss in {most_steps} steps of {batch_size} samples")
