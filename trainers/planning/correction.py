"""The correction of predictions by the errors of earlier ones: what alike runs have shown counts most.

The logarithm of measured over predicted is a sum of independent normal effects: of all runs, of the task, of the family
of schemes, of the scheme, of these together, and noise. Given the runs of the record, that of a further run has a
normal distribution (kriging; Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.2): its
mean corrects the prediction, and its variance gives the interval. So one run of a task already says something of its
other schemes, and a record of nothing alike changes little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_ALL, _TASK, _FAMILY, _SCHEME = 0.0015, 0.03, 0.006, 0.005
_TASK_AND_FAMILY, _TASK_AND_SCHEME, _TASK_AND_KIND = 0.005, 0.0015, 0.002
_NOISE = 0.003
"""Variances of the effects, of greatest likelihood over the runs of `benchmarks/train/planner.py`, rounded."""
_QUANTILE = 1.2816
"""Standard deviations on each side within which four fifths of a normal distribution are."""
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
        is_same_kind = (self.family == "single") == (other.family == "single")
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
        self._errors = [max(-_LARGEST, min(_LARGEST, math.log(ratio))) for ratio in ratios[-_MOST_RUNS:]]

    def of(self, traits: Traits) -> Correction:
        """Return the correction for a further run."""
        import numpy as np

        mean, explained = 0.0, 0.0
        if self._traits:
            shared = self._inverse @ np.array([traits.covariance(each) for each in self._traits])
            mean, explained = float(shared @ self._whitened), float(shared @ shared)
        spread = _QUANTILE * math.sqrt(traits.covariance(traits) + _NOISE - explained)
        return Correction(math.exp(mean), (math.exp(-spread), math.exp(spread)), len(self._traits))

    def before_each(self) -> list[float]:
        """Return the factor that corrects each run by those before it."""
        if not self._traits:
            return []
        means = self._errors - self._root.diagonal() * self._whitened
        return [math.exp(mean) for mean in means]

    @cached_property
    def _root(self) -> np.ndarray[Any, Any]:
        """Lower triangle L of the covariance L L' of the runs."""
        import numpy as np

        rows = [[one.covariance(other) for other in self._traits] for one in self._traits]
        return np.linalg.cholesky(np.array(rows) + _NOISE * np.eye(len(rows)))

    @cached_property
    def _inverse(self) -> np.ndarray[Any, Any]:
        """Inverse of L: a plan corrects by many traits, and each product with it is faster than a solution with L."""
        import numpy as np

        return np.linalg.inv(self._root)

    @cached_property
    def _whitened(self) -> np.ndarray[Any, Any]:
        return self._inverse @ self._errors
