"""The measurements and the tuning of YellowFin, on plain numbers.

J. Zhang, I. Mitliagkas, "YellowFin and the Art of Momentum Tuning", MLSys 2019: algorithms 1 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_AVERAGES = 8
"""Number of state values besides the window."""
_LEAST = 1e-30


@dataclass
class Measured:
    """The measured properties of the objective.

    The averages start at 0, and are divided by 1 - beta^step where they are used.
    """

    step: int
    log_h_min: float
    """Average of the logarithm of the smallest squared gradient norm in the window."""
    log_h_max: float
    norm: float
    """Average norm of the gradient."""
    squared_norm: float
    distance: float
    """Average of norm over curvature: the estimated distance to the optimum (algorithm 4)."""
    momentum: float
    """Momentum tuned at the last step."""
    lr: float
    window: list[float]
    """Squared norms of the last gradients, the newest at index step mod width; 0 for gradients that have not come yet.
    """

    @staticmethod
    def of(values: Sequence[float]) -> Measured:
        """Restore from the numbers that `values` returned."""
        step, low, high, norm, squared_norm, distance, momentum, lr = values[:NUM_AVERAGES]
        window = list(values[NUM_AVERAGES:])
        return Measured(int(step), low, high, norm, squared_norm, distance, momentum, lr, window)

    def values(self) -> list[float]:
        """Return the state as a list of `NUM_AVERAGES` numbers followed by the window."""
        head = (self.log_h_min, self.log_h_max, self.norm, self.squared_norm, self.distance, self.momentum, self.lr)
        return [float(self.step), *head, *self.window]

    def measure(self, squared_norm: float, beta: float) -> None:
        """Add the next gradient to the averages.

        Args:
            squared_norm: squared norm of the whole gradient.
            beta: decay of the averages.
        """
        self.window[self.step % len(self.window)] = squared_norm
        self.step += 1
        seen = self.window[: self.step]
        kept, new = beta, 1.0 - beta
        self.log_h_min = kept * self.log_h_min + new * math.log(max(min(seen), _LEAST))
        self.log_h_max = kept * self.log_h_max + new * math.log(max(*seen, _LEAST))
        self.norm = kept * self.norm + new * math.sqrt(squared_norm)
        self.squared_norm = kept * self.squared_norm + new * squared_norm
        self.distance = kept * self.distance + new * self.norm / max(self.squared_norm, _LEAST)

    def tune(self, variance: float, beta: float, *, slow_start: bool = True) -> None:
        """Set momentum and learning rate (algorithm 1, `SingleStep`).

        Args:
            variance: variance of the gradient, summed over its elements.
            beta: decay of the averages, same as in `measure`.
            slow_start: reduce the rate in the first 10 windows, while the averages are unreliable.
        """
        whole = 1.0 - beta**self.step
        h_min, h_max = math.exp(self.log_h_min / whole), math.exp(self.log_h_max / whole)
        self.momentum, self.lr = single_step(variance, self.distance / whole, h_min, h_max)
        if slow_start:
            self.lr *= min(1.0, self.step / (10.0 * len(self.window)))


def single_step(variance: float, distance: float, h_min: float, h_max: float) -> tuple[float, float]:
    """Return the momentum and the learning rate that bring the next step closest to the optimum, in expectation.

    They minimise mu D^2 + alpha^2 C, with alpha = (1 - sqrt(mu))^2 / h_min. With kappa = h_max / h_min, sqrt(mu) is at
    least (sqrt(kappa) - 1) / (sqrt(kappa) + 1) (equation 15 and its closed form, appendix D).

    Args:
        variance: C.
        distance: D.
        h_min: smallest curvature.
        h_max: largest curvature.
    """
    root = math.sqrt(h_max / h_min)
    least = (root - 1.0) / (root + 1.0)
    root_of_momentum = max(least, cubic_root(distance**2 * h_min**2 / 2.0, variance))
    return root_of_momentum**2, (1.0 - root_of_momentum) ** 2 / h_min


def cubic_root(pull: float, noise: float) -> float:
    """Return the x in [0, 1] with pull x = noise (1 - x)^3, by Vieta's substitution.

    It is sqrt(mu) without the bound.
    """
    if noise <= _LEAST or pull / noise > 1e12:
        return 0.0  # the noise is negligible, and only the distance matters
    p = pull / noise  # with y = x - 1: y^3 + p y + p = 0
    cube = (math.sqrt(p * p + 4.0 / 27.0 * p**3) + p) / 2.0
    w = -(cube ** (1.0 / 3.0))
    y = w - p / (3.0 * w) if w != 0.0 else 0.0
    x = min(max(y + 1.0, 0.0), 1.0)
    for _ in range(2):  # Newton steps recover the digits that cancel in the difference above
        x -= (p * x - (1.0 - x) ** 3) / (p + 3.0 * (1.0 - x) ** 2)
    return min(max(x, 0.0), 1.0)
