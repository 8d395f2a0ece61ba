"""The median stopping rule: Golovin et al., Google Vizier, 2017, section 3.2.1."""

from __future__ import annotations

import math
from bisect import insort
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Report, Stop
from orchestray.search.methods.hyper.stopping import EarlyStopping


class MedianStopping(EarlyStopping):
    """A rule that stops a trial whose best score is below the median of the other trials' running means at that step.

    The paper compares with completed trials. Here every trial counts that has reached the step, so that the rule works
    from the start with many concurrent trials. Not order-free: comparisons depend on the order of reports.
    """

    def __init__(
        self,
        *,
        grace_steps: int | None = None,
        every_steps: int | None = None,
        min_trials: int = 5,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.MedianStopping` and the arguments of `EarlyStopping`.

        Raises:
            ConfigError: a parameter is below 1, or as many steps as a trial has.
        """
        super().__init__(**arguments)
        self.grace_steps = grace_steps if grace_steps is not None else math.ceil(self.steps_per_trial / 10)
        self.every_steps = every_steps if every_steps is not None else math.ceil(self.steps_per_trial / 20)
        self.min_trials = min_trials
        if min_trials < 1:
            raise ConfigError(f"search.method.min_trials: must be >= 1, got {min_trials}")
        self.check_steps(grace_steps=self.grace_steps, every_steps=self.every_steps)
        self._means: dict[int, list[float]] = {}
        """Maps a step to the sorted running means of the trials that reached it."""
        self._sums: dict[int, tuple[int, float, float]] = {}
        """Maps a running trial to the number of its reports, their sum and the best."""

    def milestone(self, trial: int, step: int) -> int:
        return (step // self.every_steps + 1) * self.every_steps

    def judge(self, report: Report) -> Decision:
        count, total, best = self._sums.get(report.trial, (0, 0.0, -math.inf))
        count, total, best = count + 1, total + report.score, max(best, report.score)
        self._sums[report.trial] = (count, total, best)
        others = self._means.setdefault(report.step, [])
        hopeless = report.step >= self.grace_steps and len(others) >= self.min_trials and best < _median(others)
        insort(others, total / count)
        if hopeless:
            return Stop(f"its best of {best:.4g} is below the median of the others' means at step {report.step}")
        return Continue()

    def ended(self, finished: Finished) -> Finished:
        self._sums.pop(finished.trial, None)
        return finished


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
