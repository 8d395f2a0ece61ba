"""The correction of predictions by the errors of earlier ones: what alike runs have shown counts most.

The logarithm of measured over predicted is a sum of independent normal effects: of all runs, of the task, of the family
of schemes, of the scheme, of these together, and noise. Given the runs of the record, that of a further run has a
normal distribution (kriging; Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.2). Its
mean corrects the prediction. So one run of a task already says something of its other schemes, and a record of nothing
alike changes little.

Its variance gives the interval, whose width is calibrated. It is the number of standard deviations that held for 80 %
of the record's runs, where all others correct each. That is conformal prediction from residuals that leave one out
(Barber et al. 2021, "Predictive inference with the jackknife+").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SINGLE, HOGWILD = "single", "hogwild"
"""Families whose workers send no messages, so that their errors are of the kind of computing alone."""
_ALL, _TASK, _FAMILY, _SCHEME = 0.0015, 0.03, 0.006, 0.005
_TASK_AND_FAMILY, _TASK_AND_SCHEME, _TASK_AND_KIND = 0.005, 0.0015, 0.002
_NOISE = 0.003
"""Variances of the effects, of greatest likelihood over the runs of `benchmarks/train/planner.py`, rounded."""
_COVERED = 0.8
"""Part of the runs that an interval is to hold for."""
_QUANTILE = 1.2816
"""Standard deviations on each side within which that part of a normal distribution is."""
_FEW, _MANY = 4, 20
"""Runs below which a record does not say how wide intervals are; runs of a family from which on they say it for this
family alone. Families of fewer say it together.
"""
_MOST_RUNS = 500
_LARGEST = math.log(3)
"""Largest error that counts: a run that took several times as long was disturbed."""


@dataclass(frozen=True)
class Traits:
    """Traits that runs may share.

    Args:
        task: name for the task and its arguments.
        family: family of schemes, such as `zero`.
        scheme: scheme without its numbers, such as `zero gradients`.
    """

    task: str
    family: str
    scheme: str

    def covariance(self, other: Traits) -> float:
        """Return the covariance of the errors of two different runs, as squared logarithms."""
        value = _ALL
        is_same_kind = (self.family in (SINGLE, HOGWILD)) == (other.family in (SINGLE, HOGWILD))
        if self.task == other.task:
            value += _TASK + _TASK_AND_KIND * is_same_kind
        if self.family == other.family:
            value += _FAMILY + _TASK_AND_FAMILY * (self.task == other.task)
        if self.scheme == other.scheme:
            value += _SCHEME + _TASK_AND_SCHEME * (self.task == other.task)
        return value


@dataclass(frozen=True)
class Correction:
    """The correction of a prediction.

    Args:
        factor: measured over predicted, as far as the record shows; 1 without a record.
        interval: bounds of measured over corrected that are expected to hold for 80 % of the runs.
        num_runs: runs that it is made from.
    """

    factor: float
    interval: tuple[float, float]
    num_runs: int


class Corrections:
    """The corrections that some runs give.

    Args:
        traits: traits of each run, in the order of time; the last 500 count.
        ratios: measured over predicted seconds of each.
    """

    def __init__(self, traits: Sequence[Traits], ratios: Sequence[float]) -> None:
        self._traits = traits[-_MOST_RUNS:]
        self._kinds = [*dict.fromkeys(self._traits)]
        """The different traits."""
        places = {kind: place for place, kind in enumerate(self._kinds)}
        self._places = [places[each] for each in self._traits]
        """Place of each run's traits among them."""
        self._errors = [max(-_LARGEST, min(_LARGEST, math.log(ratio))) for ratio in ratios[-_MOST_RUNS:]]

    def of(self, traits: Traits) -> Correction:
        """Return the correction for a further run."""
        import numpy as np

        mean, explained = 0.0, 0.0
        if self._traits:
            shared = np.array([traits.covariance(each) for each in self._kinds])[self._places]
            weights = shared @ self._inverse
            mean, explained = float(weights @ self._errors), float(weights @ shared)
        spread = self._width(traits) * math.sqrt(traits.covariance(traits) + _NOISE - explained)
        return Correction(math.exp(mean), (math.exp(-spread), math.exp(spread)), len(self._traits))

    def _width(self, traits: Traits) -> float:
        """Return the standard deviations on each side of the mean that hold for 80 % of the runs.

        Of n sizes of errors that is the one at place 0.8 (n + 1), between two of them if need be: a further error of
        the same distribution is as likely to be at any of the n + 1 places.
        """
        import numpy as np

        if len(self._traits) < _FEW:
            return _QUANTILE
        families = [each.family for each in self._traits]
        of_many = {family for family, count in Counter(families).items() if count >= _MANY}
        pooled = {traits.family} if traits.family in of_many else {*families} - of_many
        alike = [family in pooled for family in families]
        sizes = self._sizes[alike] if sum(alike) >= _FEW else self._sizes
        width = float(np.quantile(sizes, _COVERED, method="weibull"))
        # How far a task is from all others is not to be seen in errors that its own runs have corrected.
        is_new = all(each.task != traits.task for each in self._traits)
        return max(width, _QUANTILE) if is_new else width

    def before_each(self) -> list[float]:
        """Return the factor that corrects each run by those before it."""
        if not self._traits:
            return []
        import numpy as np

        root = np.linalg.cholesky(self._covariance)
        means = self._errors - root.diagonal() * np.linalg.solve(root, self._errors)
        return [math.exp(mean) for mean in means]

    @cached_property
    def _covariance(self) -> np.ndarray[Any, Any]:
        """Covariance of the runs, with their noise."""
        import numpy as np

        return self._of_kinds[np.ix_(self._places, self._places)] + _NOISE * np.eye(len(self._places))

    @cached_property
    def _of_kinds(self) -> np.ndarray[Any, Any]:
        """Covariance of the different traits."""
        import numpy as np

        return np.array([[one.covariance(other) for other in self._kinds] for one in self._kinds])

    @cached_property
    def _inverse(self) -> np.ndarray[Any, Any]:
        """Inverse of the covariance, by Woodbury's identity: there are far fewer kinds than runs."""
        import numpy as np

        counts = np.bincount(self._places)
        inner = self._of_kinds @ np.linalg.inv(_NOISE * np.eye(len(counts)) + counts[:, None] * self._of_kinds)
        inverse: np.ndarray[Any, Any] = np.eye(len(self._places)) - inner[np.ix_(self._places, self._places)]
        return inverse / _NOISE

    @cached_property
    def _sizes(self) -> np.ndarray[Any, Any]:
        """Sizes of the errors that are left if all other runs correct each, in their standard deviations."""
        import numpy as np

        # Both by the inverse (Rasmussen and Williams 2006, section 5.4.2).
        sizes: np.ndarray[Any, Any] = np.abs(self._inverse @ self._errors) / np.sqrt(self._inverse.diagonal())
        return sizes
