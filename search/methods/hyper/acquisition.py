"""The gain that models expect of a point, and its ascent from good candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from orchestray.search.methods.hyper.encoding import Encoded, Encoder
from orchestray.search.methods.hyper.feasibility import Feasibility
from orchestray.search.methods.hyper.gaussian_process import Posterior
from orchestray.search.methods.hyper.improvement import Best, Front

_MAX_ITERATIONS = 25
_TOLERANCE = 1e-4
"""Change of the gain over one length scale that counts as none."""


@dataclass(frozen=True)
class Acquisition:
    """The logarithm of the expected improvement, plus that of the probability of keeping the bounds."""

    encoder: Encoder
    known: Encoded
    """Points of the posteriors."""
    posteriors: Sequence[Posterior]
    """One for each score."""
    aim: Best | Front | None
    """Scores to be improved on; None: nothing is feasible yet, and the probability alone counts."""
    feasibility: Feasibility | None = None

    def at(self, points: Encoded) -> np.ndarray:
        """Return the gain at each point: [len(points)]."""
        chance = np.zeros(len(points)) if self.feasibility is None else self.feasibility.log_probability(points)
        if self.aim is None:
            return chance
        distances = self.encoder.distances(self.known, points)
        means, deviations = zip(*(posterior.at(distances) for posterior in self.posteriors), strict=True)
        gains: np.ndarray = chance + self.aim.gains(np.array(means), np.array(deviations))
        return gains

    def ascend(self, point: Encoded, is_free: np.ndarray) -> Encoded:
        """Return the summit of the gain over a point, by L-BFGS; numbers that are not free stay.

        A number is measured in its length scale, so that all matter alike (as in Optuna's `GPSampler`).

        Args:
            point: the start, a batch of one.
            is_free: True for each number that may move, [num_units].
        """
        weights = np.mean([posterior.kernel.log_weights for posterior in self.posteriors], axis=0)
        lengths = np.exp(-weights[: len(is_free)][is_free] / 2)
        # Only numbers move: distances along everything else are the same on the whole way.
        distances = self.encoder.distances(self.known, point)[len(is_free) :, :, 0]
        others = [np.exp(one.kernel.log_weights[len(is_free) :]) @ distances for one in self.posteriors]

        def moved(at: np.ndarray) -> Encoded:
            units = point.units.copy()
            units[0, is_free] = np.clip(at * lengths, 0.0, 1.0)
            return Encoded(units, point.choices, point.genes)

        def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
            gain, gradient = self._slopes(moved(at), others)
            return -gain, -gradient[is_free] * lengths

        found = minimize(
            loss,
            point.units[0, is_free] / lengths,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, 1 / length) for length in lengths],
            options={"maxiter": _MAX_ITERATIONS, "maxfun": 2 * _MAX_ITERATIONS, "gtol": _TOLERANCE},
        )
        return moved(found.x)

    def _slopes(self, point: Encoded, others: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
        """Return the gain at one point, and its gradient by the numbers of the point: [num_units]."""
        gain, gradient = 0.0, np.zeros(point.units.shape[1])
        if self.feasibility is not None:
            gain, gradient = self.feasibility.slopes(point)
        if self.aim is None:
            return gain, gradient
        apart = point.units[0] - self.known.units
        rows = [one.slopes(apart, other) for one, other in zip(self.posteriors, others, strict=True)]
        means, deviations, by_means, by_deviations = (np.array(part) for part in zip(*rows, strict=True))
        improvement, of_means, of_deviations = self.aim.slopes(means, deviations)
        return gain + improvement, gradient + of_means @ by_means + of_deviations @ by_deviations
