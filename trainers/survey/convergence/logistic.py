"""Sparse logistic regression, the convex problem of the rates of SGD, with its least loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_NEWTON_STEPS = 60


@dataclass(frozen=True)
class Logistic:
    """Samples with a few features each, and their labels.

    Args:
        columns: features of each sample that are not zero, [samples, features].
        values: their values, [samples, features].
        labels: -1 or 1, [samples].
        num_features: all features.
    """

    columns: NDArray[np.intp]
    values: Values
    labels: Values
    num_features: int

    @cached_property
    def matrix(self) -> Values:
        """Samples with all their features, [samples, num_features]."""
        matrix = np.zeros((len(self.labels), self.num_features))
        np.put_along_axis(matrix, self.columns, self.values, axis=1)
        return matrix

    def loss(self, w: Values) -> Values:
        """Return the mean loss of weights, [..., num_features] to [...]."""
        losses: Values = np.logaddexp(0.0, -self.labels * (w @ self.matrix.T)).mean(axis=-1)
        return losses

    def slopes(self, samples: NDArray[np.intp], products: Values) -> Values:
        """Return the derivative of each sample's loss by the product of its features and the weights."""
        labels = self.labels[samples]
        slopes: Values = -labels / (1 + np.exp(labels * products))
        return slopes

    @cached_property
    def least_loss(self) -> float:
        """Least mean loss of any weights, by Newton's method."""
        w = np.zeros(self.num_features)
        for _ in range(_NEWTON_STEPS):
            probability = 1 / (1 + np.exp(-(self.matrix @ w)))
            gradient = self.matrix.T @ (probability - (self.labels + 1) / 2)
            hessian = (self.matrix.T * (probability * (1 - probability))) @ self.matrix
            step = np.linalg.solve(hessian + 1e-9 * np.eye(len(w)), gradient)
            while self.loss(w - step) > self.loss(w) and np.abs(step).max() > 1e-12:
                step /= 2
            w = w - step
        return float(self.loss(w))


def drawn(num_samples: int, num_features: int, num_nonzero: int, draw: np.random.Generator) -> Logistic:
    """Draw a problem whose labels no weights fit, as they are partly chance.

    Args:
        num_samples: samples.
        num_features: features.
        num_nonzero: features of a sample that are not zero.
        draw: generator of all draws.
    """
    columns = np.stack([draw.permutation(num_features)[:num_nonzero] for _ in range(num_samples)])
    values = draw.standard_normal(columns.shape)
    matrix = np.zeros((num_samples, num_features))
    np.put_along_axis(matrix, columns, values, axis=1)
    scores = matrix @ (2 * draw.standard_normal(num_features))
    labels = np.where(draw.random(num_samples) < 1 / (1 + np.exp(-scores)), 1.0, -1.0)
    return Logistic(columns, values, labels, num_features)


@dataclass(frozen=True)
class Slope:
    """The slope of a line through points on two logarithmic axes."""

    slope: float
    error: float
    """Standard error of the slope over independent repetitions."""


def log_log_slope(sizes: NDArray[Any], errors: Values) -> Slope:
    """Fit the slope of log(error) over log(size) in each repetition.

    Args:
        sizes: sizes, [sizes].
        errors: errors, [repetitions, sizes].
    """
    x = np.log(sizes) - np.log(sizes).mean()
    slopes = (np.log(errors) @ x) / (x @ x)
    return Slope(float(slopes.mean()), float(slopes.std(ddof=1) / np.sqrt(len(slopes))))
