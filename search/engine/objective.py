"""The objectives of a search: metrics by name, with a sign such that more is better, and bounds of metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.search.spaces.architectures.measures import MEASURES

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig


@dataclass(frozen=True)
class Objective:
    """A metric, and whether it is maximised or minimised."""

    metric: str
    mode: str = "max"

    def score(self, value: float) -> float:
        """Return the value with the sign with which more is better."""
        return value if self.mode == "max" else -value

    def value(self, score: float) -> float:
        """Return a score with the sign that the user gave the metric."""
        return score if self.mode == "max" else -score


@dataclass(frozen=True)
class Bound:
    """The most, or the least, that a metric may be."""

    metric: str
    limit: float
    is_most: bool = True

    @property
    def _scale(self) -> float:
        return (1.0 if self.is_most else -1.0) * (abs(self.limit) or 1.0)

    def violation(self, value: float) -> float:
        """Return by how much a value breaks the bound, relative to the bound (absolute if that is 0); 0 or less: not at
        all.
        """
        return (value - self.limit) / self._scale

    def value(self, violation: float) -> float:
        """Return the value with a violation, without the last digits, which rounding may have changed."""
        return float(f"{self.limit + violation * self._scale:.12g}")


class Objectives:
    """One or more objectives, the first of which is used where a single number is needed."""

    def __init__(self, objectives: Sequence[Objective], bounds: Sequence[Bound] = ()) -> None:
        """
        Args:
            objectives: metrics by which trials are compared.
            bounds: bounds that a feasible trial keeps.
        """
        self._all, self.bounds = tuple(objectives), tuple(bounds)
        self.first = self._all[0]
        self._metrics = list(dict.fromkeys([*(one.metric for one in self._all), *(one.metric for one in self.bounds)]))
        """Names of all metrics that a report must have, each once."""

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    @property
    def are_of_network(self) -> bool:
        """True if any of them is measured on the network."""
        return any(metric in MEASURES for metric in self._metrics)

    @property
    def of_task(self) -> list[str]:
        """Objectives that are metrics of the task itself."""
        return [metric for metric in self._metrics if metric not in (*MEASURES, "loss", "train_loss")]

    @property
    def of_validation(self) -> list[str]:
        """Objectives that only a validation tells."""
        return [metric for metric in self._metrics if metric not in (*MEASURES, "train_loss")]

    def misnamed(self, known: Collection[str]) -> str | None:
        """Return a sentence on an objective that is misspelt, given the task's own metrics; None if there is none.

        A name unlike any metric is not reported: a task may report some metrics only after some training.
        """
        from orchestray.platform.config.problems import nearest  # imported late, as below

        reported = [*known, "loss", "train_loss"]
        for metric in self.of_task:
            if metric not in reported and nearest(metric, reported):
                return self._missing(metric, reported)
        return None

    def scores(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return the score of each objective.

        Raises:
            ConfigError: a metric was not reported.
            TrainingError: a metric is not finite.
        """
        for metric in self._metrics:
            if metric not in metrics:
                raise ConfigError(self._missing(metric, metrics))
            if not math.isfinite(metrics[metric]):
                raise TrainingError(_no_number(metric, metrics[metric]))
        return tuple(objective.score(float(metrics[objective.metric])) for objective in self._all)

    def violations(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return the violation of each bound by metrics that `scores` has taken."""
        return tuple(bound.violation(float(metrics[bound.metric])) for bound in self.bounds)

    def are_broken_by(self, measures: Mapping[str, float]) -> bool:
        """Return True if the size of a network breaks a bound, so that no training can make it feasible.

        Its score is still wanted, and `train_loss` is known of trained networks only: with that none is refused.
        """
        sizes = {name: measures[name] for name in ("parameters", "flops") if name in measures}
        broken = any(bound.metric in sizes and bound.violation(sizes[bound.metric]) > 0 for bound in self.bounds)
        return broken and "train_loss" not in self._metrics

    def bounded(self, violations: Sequence[float]) -> dict[str, float]:
        """Return the values of the metrics that have bounds, from their violations."""
        return {bound.metric: bound.value(one) for bound, one in zip(self.bounds, violations, strict=True)}

    def evaluations(self, validations: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
        """Return the scores of validations by the first objective, for those that have it."""
        values = [validation.get(self.first.metric, math.nan) for validation in validations]
        return tuple(self.first.score(float(value)) for value in values if math.isfinite(value))

    def _missing(self, metric: str, reported: Collection[str]) -> str:
        from orchestray.platform.config.problems import nearest  # imports pydantic, which trials do not need otherwise

        key = "metric" if any(one.metric == metric for one in self._all) else f"subject_to.{metric}"
        names, hint = ", ".join(sorted(reported)) or "nothing", nearest(metric, reported)
        return f"search.objective.{key}: no trial reports {metric!r}; what is reported is {names}{hint}"

    def values(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the value of each objective by its metric, with the user's sign."""
        return {objective.metric: objective.value(score) for objective, score in zip(self._all, scores, strict=True)}


def objectives_of(config: SearchConfig) -> Objectives:
    """Return the objectives of a search's config."""
    bounds = []
    for metric, limits in config.search.bounds.items():
        given = ((limits.max, True), (limits.min, False))
        bounds += [Bound(metric, limit, is_most) for limit, is_most in given if limit is not None]
    return Objectives([Objective(one.metric, str(one.mode)) for one in config.search.objective], bounds)


def _no_number(metric: str, value: float) -> str:
    if metric == "flops":
        return "The flops of the network are not known: the warnings of the trial name what cannot be counted."
    return f"The metric {metric!r} is {value}, no finite number."
