"""The probability that a point keeps the bounds of a search (Gardner et al., Bayesian optimization with inequality
constraints, 2014, section 3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import log_ndtr

from orchestray.search.methods.hyper.gaussian_process import Kernel, Posterior, fit

if TYPE_CHECKING:
    from orchestray.search.methods.hyper.encoding import Encoded, Encoder
    from orchestray.search.methods.hyper.history import History

_MAX_KNOWN = 128
"""Most trials that the models know: those nearest to a bound, which lies between them."""
_FIT_ITERATIONS = 20


class Feasibility:
    """A Gaussian process of each bound's violation; a point is feasible if all violations are at most 0."""

    def __init__(self, encoder: Encoder, prior: Kernel) -> None:
        self._encoder, self._prior = encoder, prior
        self._kernels: list[Kernel] = []
        self._num_at_fit = 0

    def update(self, history: History) -> None:
        """Take in the ended trials; kernels are kept while few have ended since their fit."""
        violations = history.violations()
        known = np.flatnonzero(np.isfinite(violations).all(1))
        nearest = np.argsort(np.abs(violations[known]).min(1, initial=np.inf), kind="stable")[:_MAX_KNOWN]
        known = np.sort(known[nearest])
        self._points = history.points()[known]
        distances = self._encoder.distances(self._points, self._points)
        # Logarithms of large values, since a network may be a thousand times too large; the bound stays at 0.
        bent = np.sign(violations[known]) * np.log1p(np.abs(violations[known]))
        self._means, spreads = bent.mean(0), bent.std(0)
        self._spreads = np.where(spreads > 1e-12, spreads, 1.0)
        columns = ((bent - self._means) / self._spreads).T
        if not self._kernels or len(history) - self._num_at_fit >= max(1, self._num_at_fit // 16):
            starts = self._kernels or [self._prior] * len(columns)
            pairs = zip(columns, starts, strict=True)
            self._kernels = [fit(distances, column, self._prior, start, _FIT_ITERATIONS) for column, start in pairs]
            self._num_at_fit = len(history)
        fitted = zip(self._kernels, columns, strict=True)
        self._posteriors = [Posterior(kernel, distances, column) for kernel, column in fitted]

    def log_probability(self, points: Encoded) -> np.ndarray:
        """Return the logarithm of the probability that each point keeps all bounds: [len(points)]."""
        distances = self._encoder.distances(self._points, points)
        total = np.zeros(len(points))
        for posterior, mean, spread in zip(self._posteriors, self._means, self._spreads, strict=True):
            means, deviations = posterior.at(distances)
            total += log_ndtr(-(means + mean / spread) / deviations)
        return total

    def slopes(self, point: Encoded) -> tuple[float, np.ndarray]:
        """Return the logarithm of the probability at one point, and its gradient by the numbers: [num_units]."""
        apart = point.units[0] - self._points.units
        num_units = apart.shape[1]
        distances = self._encoder.distances(self._points, point)[num_units:, :, 0]
        total, gradient = 0.0, np.zeros(num_units)
        for posterior, middle, spread in zip(self._posteriors, self._means, self._spreads, strict=True):
            mean, deviation, by_mean, by_deviation = posterior.slopes(
                apart, np.exp(posterior.kernel.log_weights[num_units:]) @ distances
            )
            z = -(mean + middle / spread) / deviation
            log_chance = float(log_ndtr(z))
            # The hazard of a normal distribution, exact where both parts vanish.
            hazard = math.exp(-z * z / 2 - math.log(2 * math.pi) / 2 - log_chance)
            total += log_chance
            gradient -= hazard * (by_mean + z * by_deviation) / deviation
        return total, gradient
