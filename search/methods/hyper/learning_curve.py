"""Stopping by predicted learning curves: Domhan et al., Speeding up automatic hyperparameter optimization, 2015."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Report, Stop
from orchestray.search.methods.hyper.curves import predict
from orchestray.search.methods.hyper.stopping import EarlyStopping

_MIN_REPORTS = 4
_MIN_TRIALS = 3
"""Trials that must have reported before the range of scores is known."""


class LearningCurve(EarlyStopping):
    """A rule that stops a trial when the probability that its final score beats the best score falls below a bound.

    The best score is the best that any trial has reported. For a stopped trial, the inner method receives the predicted
    final score (section 3.3 of the paper). Not order-free: a decision depends on the best score at that time.
    """

    def __init__(
        self,
        *,
        probability: float = 0.05,
        grace_steps: int | None = None,
        every_steps: int | None = None,
        **arguments: Any,
    ) -> None:
        """Take the parameters of `params.LearningCurve` and the arguments of `EarlyStopping`.

        A trial is not stopped before its fourth report.

        Raises:
            ConfigError: a parameter is out of its range.
        """
        super().__init__(**arguments)
        self.probability = probability
        self.grace_steps = grace_steps if grace_steps is not None else math.ceil(self.steps_per_trial / 5)
        self.every_steps = every_steps if every_steps is not None else math.ceil(self.steps_per_trial / 20)
        if not 0 < probability < 1:
            raise ConfigError(f"search.method.probability: must be above 0 and below 1, got {probability}")
        self.check_steps(grace_steps=self.grace_steps, every_steps=self.every_steps)
        self._curves: dict[int, list[tuple[int, float]]] = {}
        """Reports of the running trials."""
        self._predicted: dict[int, float] = {}
        """Predictions for stopped trials whose end the inner method has not received yet."""
        self._first: list[float] = []
        """First scores of all trials: the start of the curves."""
        self._best = -math.inf

    def milestone(self, trial: int, step: int) -> int:
        return (step // self.every_steps + 1) * self.every_steps

    def judge(self, report: Report) -> Decision:
        if not math.isfinite(report.score):  # no point of a curve
            return Stop("it has diverged") if report.step >= self.grace_steps else Continue()
        curve = self._curves.setdefault(report.trial, [])
        if not curve:
            self._first.append(report.score)
        curve.append((report.step, report.score))
        best_of_others, self._best = self._best, max(self._best, report.score)
        if (
            report.step < self.grace_steps
            or report.step >= self.budget(report.trial)
            or len(curve) < _MIN_REPORTS
            or len(self._first) < _MIN_TRIALS
            or report.score >= best_of_others
        ):
            return Continue()
        steps, scores = np.array(curve).T
        low = float(np.median(self._first))
        prediction = predict(steps, scores, self.budget(report.trial), min(low, float(scores.min())), self._best)
        chance = prediction.probability_above(self._best)
        if chance >= self.probability:
            return Continue()
        self._predicted[report.trial] = prediction.mean
        return Stop(
            f"beats {self._best:.4g} with a probability of {chance:.2g} only; {prediction.mean:.4g} is predicted"
        )

    def ended(self, finished: Finished) -> Finished:
        self._curves.pop(finished.trial, None)
        predicted = self._predicted.pop(finished.trial, None)
        if finished.status != "stopped" or predicted is None or finished.score is None:
            return finished
        score = max(finished.score, predicted)
        return replace(finished, score=score, scores=(score, *finished.scores[1:]) if finished.scores else ())
