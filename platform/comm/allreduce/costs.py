"""Costs of all-reduce algorithms if a message of n bytes takes alpha + n beta, and the choice of the cheapest.

The model is LogP with no overhead and no gap (L = alpha, G = beta), as used by Ben-Nun and Hoefler (2019), section 2.5.
The formulas hold for any number of ranks; see `schedules` for the extra cost if that is not a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, is_power_of_two, num_levels

_LEAST_S = 1e-9
"""Lower bound on the time of a message: a fit to noisy times may come out below it."""


@dataclass(frozen=True)
class AlphaBeta:
    """The time of a message: `alpha_s + num_bytes * beta_s_per_byte`."""

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes * self.beta_s_per_byte

    @classmethod
    def fit(cls, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
        """Fit alpha and beta by least squares of the relative errors, so that small and large messages count alike.

        Raises:
            ValueError: there are not two different sizes with a time above zero each.
        """
        sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
        if len(np.unique(sizes)) < 2 or sizes.shape != times.shape or not (times > 0).all():
            raise ValueError(f"Two sizes or more are needed, with the time of each; got {sizes_bytes} and {times_s}.")
        rows = np.stack([1 / times, sizes / times], axis=1)
        (alpha_s, beta), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
        if alpha_s < _LEAST_S or beta < 0:  # one came out negative: the best fit with it at its bound
            ratio = sizes / times
            alpha_s, beta = (_LEAST_S, ratio.sum() / (ratio**2).sum()) if beta > 0 else (_mean(times), 0.0)
        return cls(float(alpha_s), float(beta))


def _mean(times: np.ndarray) -> float:
    """Return the constant with the least squared relative error to the times."""
    return float((1 / times).sum() / (1 / times**2).sum())


def cost_s(algorithm: str, size: int, num_bytes: float, model: AlphaBeta) -> float:
    """Return the seconds that an all-reduce of `num_bytes` takes among `size` ranks.

    Args:
        algorithm: one of `ALGORITHMS`, or "star" for a parameter server on one of the ranks.
        size: number of ranks.
        num_bytes: bytes of the tensor.
        model: time of a message.

    Raises:
        ValueError: unknown algorithm.
    """
    if size == 1:
        return 0.0
    message_s, byte_s = model.time_s(num_bytes), num_bytes * model.beta_s_per_byte
    levels, folding_s = num_levels(size), 0.0 if is_power_of_two(size) else 2 * message_s
    places = 1 << levels
    if algorithm == "tree":
        return 2 * (size - 1).bit_length() * message_s
    if algorithm == "butterfly":
        return levels * message_s + folding_s
    if algorithm == "ring":
        return 2 * (size - 1) * model.time_s(num_bytes / size)
    if algorithm == "rabenseifner":
        return 2 * levels * model.alpha_s + 2 * byte_s * (places - 1) / places + folding_s
    if algorithm == "star":
        return 2 * (size - 1) * message_s
    raise ValueError(f"There is no formula for {algorithm!r}; there are those of {', '.join(ALGORITHMS)}, star.")


def costs_s(
    size: int, num_bytes: float, model: AlphaBeta, measured: Mapping[str, AlphaBeta] | None = None
) -> dict[str, float]:
    """Return the cost in seconds of each algorithm, by name.

    Args:
        size: number of ranks.
        num_bytes: bytes of the tensor.
        model: time of a message.
        measured: further algorithms, whose whole time (not that of a message) was measured and fitted.
    """
    costs = {algorithm: cost_s(algorithm, size, num_bytes, model) for algorithm in ALGORITHMS}
    return costs | {name: whole.time_s(num_bytes) for name, whole in (measured or {}).items()}


def cheapest(costs: Mapping[str, float]) -> str:
    """Return the name with the least cost; of costs equal up to rounding, the first."""
    least = min(costs.values())
    return next(name for name, cost in costs.items() if cost <= least * (1 + 1e-12))
