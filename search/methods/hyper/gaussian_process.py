"""A Gaussian process over points of a search: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006.

scikit-learn's implementation does not support a kernel over numbers, choices and genomes at once, nor a fit of a few
iterations from the previous result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import erfcx, ndtr

_LENGTH_SPREAD = 0.7
_NOISE_MEAN, _NOISE_SPREAD = math.log(1e-4), 2.0
_LOW, _HIGH = 1e-6, 1e1
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True)
class Kernel:
    """Matern 5/2 with a length scale along each axis (equation 4.17), and noise. Scores are standardised."""

    log_weights: np.ndarray
    """[num_groups]: logarithm of the inverse squared length scale."""
    log_signal: float
    """Logarithm of the variance of the modelled function."""
    log_noise: float
    """Logarithm of the variance of the noise."""

    @staticmethod
    def prior(lengths: np.ndarray) -> Kernel:
        """Return the kernel at which a fit begins, and which its prior favours.

        Args:
            lengths: expected length scale of each axis: [num_groups].
        """
        return Kernel(-2 * np.log(lengths), 0.0, _NOISE_MEAN)

    def covariance(self, distances: np.ndarray) -> np.ndarray:
        """Return the covariance without noise, [n, m], from squared distances [num_groups, n, m]."""
        root = np.sqrt(5 * np.tensordot(np.exp(self.log_weights), distances, 1))
        covariance: np.ndarray = math.exp(self.log_signal) * (1 + root + root**2 / 3) * np.exp(-root)
        return covariance


def fit(distances: np.ndarray, scores: np.ndarray, prior: Kernel, start: Kernel, max_iterations: int) -> Kernel:
    """Return the most probable kernel: the likelihood of the scores times a prior (equations 5.8 and 5.9).

    Args:
        distances: squared distances between the points: [num_groups, n, n].
        scores: [n], standardised.
        prior: mean of the prior.
        start: start of the ascent.
        max_iterations: most iterations of L-BFGS.
    """
    middle = np.array([*prior.log_weights, prior.log_signal, prior.log_noise])
    spread = np.array([*[2 * _LENGTH_SPREAD] * len(distances), 1.0, _NOISE_SPREAD])

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _loss(distances, scores, at)
        away = (at - middle) / spread
        return value + 0.5 * float(away @ away), gradient + away / spread

    begin = np.array([*start.log_weights, start.log_signal, start.log_noise])
    bounds = [(-12.0, 8.0)] * len(distances) + [(-4.0, 4.0), (math.log(_LOW), math.log(_HIGH))]
    found = minimize(
        loss,
        begin,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": max_iterations, "maxfun": 2 * max_iterations},
    )
    return Kernel(found.x[:-2], float(found.x[-2]), float(found.x[-1]))


def _loss(distances: np.ndarray, scores: np.ndarray, at: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative log-likelihood, and its gradient."""
    weights, signal, noise = np.exp(at[:-2]), math.exp(at[-2]), math.exp(at[-1])
    root = np.sqrt(5 * np.tensordot(weights, distances, 1))
    falling = np.exp(-root)
    covariance = signal * (1 + root + root**2 / 3) * falling
    identity = np.eye(len(scores))
    factor = cho_factor(covariance + noise * identity, lower=True, check_finite=False)
    inverse = cho_solve(factor, identity, check_finite=False)
    alpha = inverse @ scores
    value = 0.5 * float(scores @ alpha) + float(np.log(np.diag(factor[0])).sum())
    inner = inverse - np.outer(alpha, alpha)  # twice the gradient with respect to the covariance
    slope = -5 / 6 * signal * (1 + root) * falling * inner
    by_weights = 0.5 * weights * np.tensordot(distances, slope, 2)
    return value, np.array([*by_weights, 0.5 * np.sum(inner * covariance), 0.5 * noise * np.trace(inner)])


class Posterior:
    """The posterior of the scores, given the scores at some points."""

    def __init__(self, kernel: Kernel, distances: np.ndarray, scores: np.ndarray) -> None:
        """
        Args:
            kernel: the fitted kernel.
            distances: squared distances between the points: [num_groups, n, n].
            scores: [n], standardised.
        """
        self.kernel = kernel
        covariance = kernel.covariance(distances)
        covariance[np.diag_indices_from(covariance)] += math.exp(kernel.log_noise)
        self._factor = np.linalg.cholesky(covariance)
        self._alpha = cho_solve((self._factor, True), scores, check_finite=False)

    def at(self, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation at m points, from squared distances to the known points, [num_groups, n, m]."""
        across = self.kernel.covariance(distances)
        means = across.T @ self._alpha
        solved = solve_triangular(self._factor, across, lower=True, check_finite=False)
        variances = math.exp(self.kernel.log_signal) - np.einsum("nm,nm->m", solved, solved)
        return means, np.sqrt(np.maximum(variances, _LEAST_VARIANCE))

    def slopes(self, apart: np.ndarray, others: np.ndarray) -> tuple[float, float, np.ndarray, np.ndarray]:
        """Return mean and deviation at one point, and the gradients of both by its numbers.

        Args:
            apart: the point's numbers less those of the known points, [n, num_units].
            others: weighted squared distances along the other axes, [n].

        Returns:
            The mean, the deviation, and the gradient of each: [num_units].
        """
        scales, signal = np.exp(self.kernel.log_weights[: apart.shape[1]]), math.exp(self.kernel.log_signal)
        root = np.sqrt(5 * ((apart * apart) @ scales + others))
        falling = signal * np.exp(-root)
        across = (1 + root + root**2 / 3) * falling
        solved = cho_solve((self._factor, True), across, check_finite=False)
        bend = -5 / 3 * (1 + root) * falling
        variance = max(signal - float(across @ solved), _LEAST_VARIANCE)
        deviation = math.sqrt(variance)
        by_mean, by_variance = scales * ((bend * self._alpha) @ apart), -2 * scales * ((bend * solved) @ apart)
        return float(across @ self._alpha), deviation, by_mean, by_variance / (2 * deviation)


def log_expected_improvement(means: np.ndarray, deviations: np.ndarray, best: float | np.ndarray) -> np.ndarray:
    """Return the logarithm of the mean of max(score - best, 0), exact even for tiny values.

    Ament et al., Unexpected improvements to expected improvement, 2023, equation 9.
    """
    z = (means - best) / deviations
    near = np.maximum(z, -1.0)
    plain = np.log(np.exp(-(near**2) / 2) / math.sqrt(2 * math.pi) + near * ndtr(near))
    far = np.maximum(-np.minimum(z, -1.0), 1.0)
    share = math.sqrt(math.pi / 2) * far * erfcx(far / math.sqrt(2))
    rest = np.where(far > 1e3, far**-2.0, 1 - share)  # the series, where the difference loses all digits
    tail = -(far**2) / 2 - math.log(2 * math.pi) / 2 + np.log(rest)
    log_gain: np.ndarray = np.log(deviations) + np.where(z > -1.0, plain, tail)
    return log_gain
