"""What an all-reduce costs where a message of n bytes takes alpha + n beta, and which one costs least.

The model is LogP's with no overhead and no gap (L = alpha, G = beta), as Ben-Nun and Hoefler (2019), section 2.5, use
it. The formulas hold for any number of ranks; see `schedules` for what a number that is no power of two adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestray.platform.collectives.schedules import ALGORITHMS, is_power_of_two, num_levels

_LEAST_S = 1e-9
"""No message is faster: a fit to noisy times may come out below."""


@dataclass(frozen=True)
class AlphaBeta:
    """What a message takes: `alpha_s + num_bytes * beta_s_per_byte`."""

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes * self.beta_s_per_byte

    @classmethod
    def fit(cls, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
        """The two numbers with the least sum of squared relative errors, so that small messages count as large ones do.

        Raises:
            ValueError: there are not two different sizes with a time above zero each.
        """
        sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
        if len(np.unique(sizes)) < 2 or sizes.shape != times.shape or not (times > 0).all():
            raise ValueError(f"Two sizes or more are needed, with the time of each; got {sizes_bytes} and {times_s}.")
        rows = np.stack([1 / times, sizes / times], axis=1)
        (alpha_s, beta), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
        if alpha_s < _LEAST_S or beta < 0:  # the best with the one that came out negative at its bound
            ratio = sizes / times
            alpha_s, beta = (_LEAST_S, ratio.sum() / (ratio**2).sum()) if beta > 0 else (_mean(times), 0.0)
        return cls(float(alpha_s), float(beta))


def _mean(times: np.ndarray) -> float:
    """The constant nearest to the times in squared relative error."""
    return float((1 / times).sum() / (1 / times**2).sum())


def cost_s(algorithm: str, size: int, num_bytes: float, model: AlphaBeta) -> float:
    """What an all-reduce of `num_bytes` takes among `size` ranks; "star" is a parameter server on one of them.

    Raises:
        ValueError: no such algorithm.
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
    """The cost of each algorithm, and of those whose whole time, not that of a message, was measured and fitted."""
    costs = {algorithm: cost_s(algorithm, size, num_bytes, model) for algorithm in ALGORITHMS}
    return costs | {name: whole.time_s(num_bytes) for name, whole in (measured or {}).items()}


def cheapest(costs: Mapping[str, float]) -> str:
    """The name of the least cost; of equal ones, up to a rounding, the first."""
    least = min(costs.values())
    return next(name for name, cost in costs.items() if cost <= least * (1 + 1e-12))


def latency_bound_s(size: int, model: AlphaBeta) -> float:
    """No all-reduce is faster: L log2 P, since a round at most doubles the ranks that have heard of one."""
    return math.log2(size) * model.alpha_s


def bandwidth_bound_s(size: int, num_bytes: float, model: AlphaBeta) -> float:
    """No all-reduce is faster: n G, since whoever has the result has heard as much from the others."""
    return num_bytes * model.beta_s_per_byte if size > 1 else 0.0


def no_redundancy_bound_s(size: int, num_bytes: float, model: AlphaBeta) -> float:
    """None in which no addition is done twice is faster: L log2 P + 2 n G (P - 1)/P."""
    return latency_bound_s(size, model) + 2 * num_bytes * model.beta_s_per_byte * (size - 1) / size
