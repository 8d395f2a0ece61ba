"""The improvement that a point promises, by the distribution of its scores: on the best, or on a front of several."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, logsumexp

from orchestray.search.methods.fronts import pareto_ranks
from orchestray.search.methods.hyper.gaussian_process import log_expected_improvement

_LOG_ROOT = math.log(2 * math.pi) / 2
_LEAST_STRIP = 1e-12
"""Part of a gain that a strip of the area has at least, for its logarithm."""
_MARGIN = 0.1
"""Distance of the corner of the area from the worst of the front, in ranges of the front."""


@dataclass(frozen=True)
class Best:
    """The best score so far."""

    score: float

    def gains(self, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        """Return the logarithm of the expected improvement, [m], of scores of m points, [1, m]."""
        return log_expected_improvement(means[0], deviations[0], self.score)

    def slopes(self, means: np.ndarray, deviations: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the gain of one point, and its derivatives by the means and by the deviations, [1]."""
        gain = self.gains(means[:, None], deviations[:, None])
        z = (means - self.score) / deviations
        return float(gain[0]), np.exp(log_ndtr(z) - gain), np.exp(-(z**2) / 2 - _LOG_ROOT - gain)


class Front:
    """Trials that no other dominates, by two scores; more than two are mixed to two.

    The improvement is the area that a point adds to the area that the front dominates. Between neighbours of the front
    lies a strip, and the added part of it is a product of the two scores. So its mean is exact if they are independent
    (Emmerich et al., A multicriteria generalization of Bayesian global optimization, 2016). Its logarithm has a useful
    gradient everywhere (Ament et al., Unexpected improvements to expected improvement, 2023).
    """

    def __init__(self, scores: np.ndarray, mix: np.ndarray) -> None:
        """
        Args:
            scores: scores of trials, [n, num_scores].
            mix: weights of the scores in the two that count, [2, num_scores].
        """
        self._mix = mix
        pairs = scores @ mix.T
        front = np.unique(pairs[pareto_ranks(pairs) == 0], axis=0)  # the first rises, so the second falls
        corner = front.min(0) - _MARGIN * (np.ptp(front, axis=0) + pairs.std(0))
        self._edges = np.append(corner[0], front[:, 0])
        """Lower ends of the strips by the first score, rising: [num_strips]."""
        self._floors = np.append(front[:, 1], corner[1])
        """Height of the front in each strip, by the second score: [num_strips]."""

    def gains(self, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        """Return the logarithm of the expected improvement, [m], of scores of m points, [num_scores, m]."""
        return self._parts(self._mix @ means, np.sqrt(self._mix**2 @ deviations**2))[0]

    def _parts(self, means: np.ndarray, deviations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the gains [m] of pairs [2, m], and the parts of each strip along either score: [m, num_strips]."""
        (x, y), (of_x, of_y) = means[:, :, None], deviations[:, :, None]
        beyond = log_expected_improvement(x, of_x, self._edges)
        later = np.append(beyond[:, 1:], np.full((len(beyond), 1), -np.inf), axis=1) - beyond
        wide = beyond + np.log(np.maximum(-np.expm1(np.minimum(later, 0.0)), _LEAST_STRIP))
        high = log_expected_improvement(y, of_y, self._floors)
        gains: np.ndarray = logsumexp(wide + high, axis=1)
        return gains, wide, high

    def slopes(self, means: np.ndarray, deviations: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the gain of one point, and its derivatives by the means and by the deviations, [num_scores]."""
        mixed = self._mix @ means, np.sqrt(self._mix**2 @ deviations**2)
        (gain,), (wide,), (high,) = self._parts(mixed[0][:, None], mixed[1][:, None])
        shares = np.exp(wide + high - gain)
        z, of_y = (mixed[0][0] - self._edges) / mixed[1][0], (mixed[0][1] - self._floors) / mixed[1][1]
        by_mean = np.empty(2)
        by_deviation = np.empty(2)
        parts = (log_ndtr(z), by_mean), (-(z**2) / 2 - _LOG_ROOT, by_deviation)
        for log_part, into in parts:  # a strip ends where the next begins
            into[0] = shares @ (np.exp(log_part - wide) - np.append(np.exp(log_part[1:] - wide[:-1]), 0.0))
        by_mean[1] = shares @ np.exp(log_ndtr(of_y) - high)
        by_deviation[1] = shares @ np.exp(-(of_y**2) / 2 - _LOG_ROOT - high)
        return float(gain), self._mix.T @ by_mean, deviations * ((self._mix**2).T @ (by_deviation / mixed[1]))
