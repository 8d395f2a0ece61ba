"""How a learning curve goes on: a weighted ensemble of parametric curves (Domhan et al., 2015, section 3), exactly.

Each curve is y(u) = c - a f(u) + noise with u = step / horizon, where f falls from 1 at the first report to 0 at the
horizon, so c is the final score. For a given shape f the model is linear in c and a, so with a normal-inverse-gamma
prior its evidence and its prediction (a Student t) are known in closed form. The shapes of four of the paper's families
are laid on a grid and weighted by their evidence, in place of the paper's Markov chain: it needs no random numbers and
well below a millisecond a prediction. Of the paper's eleven families, those that are linear in all but their shape are
here: pow, ilog2, Weibull and Janoschek (with exp), MMF and Hill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, logsumexp, stdtr

_RATES = np.geomspace(2.0, 200.0, 9)
_POWERS = np.array([0.5, 1.0, 2.0])
_EXPONENTS = np.array([0.25, 0.5, 1.0, 1.5, 2.0])
_LOG_RATES = np.array([3.0, 30.0, 300.0])
_NOISE = 0.03
"""Prior guess of the noise, as a part of the range of scores."""
_NOISE_WEIGHT = 2.0
"""Shape of the inverse gamma distribution of its square: how much the guess weighs, in pairs of reports."""
_SPREAD = 0.4
"""Prior standard deviation of c and a, in ranges of scores, where the noise is as guessed."""


@dataclass(frozen=True)
class Prediction:
    """A mixture of Student t distributions, of the score at the horizon."""

    weights: np.ndarray
    """[num_shapes], sum 1."""
    means: np.ndarray
    scales: np.ndarray
    degrees_of_freedom: float

    @property
    def mean(self) -> float:
        return float(self.weights @ self.means)

    def probability_above(self, score: float) -> float:
        """That the final score is better than this one."""
        return float(self.weights @ stdtr(self.degrees_of_freedom, (self.means - score) / self.scales))


def predict(steps: np.ndarray, scores: np.ndarray, horizon: int, low: float, high: float) -> Prediction:
    """Predict the score at the horizon from the first part of a curve.

    Args:
        steps: [n], rising, below the horizon, the first above 0.
        scores: [n].
        horizon: the step of the last report.
        low: a poor score of this problem, which sets the scale.
        high: a good one.

    Raises:
        ValueError: fewer than two reports.
    """
    if len(steps) < 2:
        raise ValueError(f"a curve needs two reports at least, got {len(steps)}")
    width = max(high - low, 1e-12)
    targets = (np.asarray(scores, dtype=float) - low) / width
    shapes, log_prior = _shapes(np.asarray(steps, dtype=float) / horizon)
    # Bayesian linear regression of `targets` on [1, -f], for all shapes at once; the prior mean is c = 1/2, a = 1/2.
    ones = np.ones_like(shapes)
    design = np.stack([ones, -shapes], axis=-1)  # [num_shapes, n, 2]
    prior_mean = np.array([0.5, 0.5])
    prior_precision = (_NOISE / _SPREAD) ** 2 * np.eye(2)
    precision = prior_precision + np.einsum("sni,snj->sij", design, design)
    right = prior_precision @ prior_mean + np.einsum("sni,n->si", design, targets)
    covariance = np.linalg.inv(precision)
    posterior_mean = np.einsum("sij,sj->si", covariance, right)
    shape = _NOISE_WEIGHT + len(targets) / 2
    residual = targets @ targets + prior_mean @ prior_precision @ prior_mean
    fitted = np.einsum("si,sij,sj->s", posterior_mean, precision, posterior_mean)
    rate = _NOISE_WEIGHT * _NOISE**2 + 0.5 * np.maximum(residual - fitted, 0.0)
    log_evidence = -0.5 * np.linalg.slogdet(precision)[1] - shape * np.log(rate) + gammaln(shape)
    log_weights = log_prior + log_evidence
    weights = np.exp(log_weights - logsumexp(log_weights))
    scales = np.sqrt(rate / shape * (1 + covariance[:, 0, 0]))
    return Prediction(weights, low + width * posterior_mean[:, 0], width * scales, 2 * shape)


def _shapes(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All shapes at these parts of the horizon: [num_shapes, n], 1 at the first and 0 at the horizon; and the logarithm
    of their prior, even over the families.
    """
    at = np.append(places, 1.0)
    rates, powers = (grid.reshape(-1, 1) for grid in np.meshgrid(_RATES, _POWERS))
    scaled = (rates * at) ** powers
    families = [
        at ** -_EXPONENTS[:, None],
        np.exp(-scaled),
        1 / (1 + scaled),
        1 / np.log(1 + 1 / at.min() * _LOG_RATES[:, None] * at),
    ]
    shapes = np.concatenate(families)
    last = shapes[:, -1:]
    fall = shapes[:, :1] - last
    usable = fall[:, 0] > 1e-9  # the steepest are over before the first report
    log_prior = np.concatenate([np.full(len(family), -np.log(len(family))) for family in families])
    return ((shapes - last)[:, :-1] / np.maximum(fall, 1e-9))[usable], log_prior[usable]
