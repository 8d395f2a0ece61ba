"""Seconds that each worker computes in each step: workers differ in speed, and some steps are slow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Compute:
    """Seconds of a worker's computation in a step.

    Args:
        base_s: seconds of a worker of ordinary speed in an ordinary step.
        speed_spread: standard deviation of the logarithm of a worker's own factor, which it keeps.
        slow_probability: probability that a step of a worker is slow, drawn for each.
        slow_factor: how many times as long a slow step takes.
        seed: seed of all draws.
    """

    base_s: float
    speed_spread: float = 0.0
    slow_probability: float = 0.0
    slow_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.speed_spread < 0 or not 0 <= self.slow_probability <= 1 or self.slow_factor < 1:
            raise ValueError(
                "a computation takes 0 s or more, its speed_spread is not negative, slow_probability is from 0 to 1, "
                f"and slow_factor at least 1; got {self}"
            )

    def draw(self, num_steps: int, num_workers: int) -> NDArray[np.float64]:
        """Return the seconds of each step of each worker, [num_steps, num_workers]."""
        speeds, slow = (np.random.default_rng(each) for each in np.random.SeedSequence(self.seed).spawn(2))
        factors = np.exp(self.speed_spread * speeds.standard_normal(num_workers))
        is_slow = slow.random((num_steps, num_workers)) < self.slow_probability
        seconds: NDArray[np.float64] = self.base_s * factors * np.where(is_slow, self.slow_factor, 1.0)
        return seconds

    @property
    def is_even(self) -> bool:
        """True if every step of every worker takes the same."""
        return self.speed_spread == 0 and (self.slow_probability == 0 or self.slow_factor == 1)
