"""What a search looks for: metrics by name, turned so that more is better."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestray.platform.config.search.measures import MEASURES
from orchestray.platform.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class Objective:
    """A metric, and whether more of it is better."""

    metric: str
    mode: str = "max"

    def score(self, value: float) -> float:
        """To be maximised."""
        return value if self.mode == "max" else -value

    def value(self, score: float) -> float:
        """What the user calls it."""
        return score if self.mode == "max" else -score


class Objectives:
    """One objective or several, the first of which decides where one number is asked for."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._all = tuple(objectives)
        self.first = self._all[0]

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    @property
    def are_of_network(self) -> bool:
        """Whether any of them is found by measuring the network."""
        return any(objective.metric in MEASURES for objective in self._all)

    @property
    def of_task(self) -> list[str]:
        """Metrics of the task's own that are looked for."""
        return [one.metric for one in self._all if one.metric not in (*MEASURES, "loss", "train_loss")]

    def misnamed(self, known: Collection[str]) -> str | None:
        """What is wrong if the task's own metrics are these, in a sentence; None if nothing is for certain.

        What is like none of them is no slip of the pen: a task may report it only once something is learned.
        """
        from orchestray.platform.config.problems import nearest  # as below

        reported = [*known, "loss", "train_loss"]
        for metric in self.of_task:
            if metric not in reported and nearest(metric, reported):
                return _missing(metric, reported)
        return None

    def scores(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Of each objective its score.

        Raises:
            ConfigError: a metric is not among those that were reported.
            TrainingError: it is no finite number.
        """
        for objective in self._all:
            if objective.metric not in metrics:
                raise ConfigError(_missing(objective.metric, metrics))
            if not math.isfinite(metrics[objective.metric]):
                raise TrainingError(
                    f"The metric {objective.metric!r} is {metrics[objective.metric]}, no finite number."
                )
        return tuple(objective.score(float(metrics[objective.metric])) for objective in self._all)

    def evaluations(self, validations: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
        """Scores of validations by the first objective, where they have it."""
        values = [validation.get(self.first.metric, math.nan) for validation in validations]
        return tuple(self.first.score(float(value)) for value in values if math.isfinite(value))

    def values(self, scores: Sequence[float]) -> dict[str, float]:
        """Each objective by its metric, as the user calls it."""
        return {objective.metric: objective.value(score) for objective, score in zip(self._all, scores, strict=True)}


def _missing(metric: str, reported: Collection[str]) -> str:
    from orchestray.platform.config.problems import nearest  # brings pydantic, which a trial has no other use for

    return (
        f"search.objective.metric: no trial reports {metric!r}; what is reported is "
        f"{', '.join(sorted(reported)) or 'nothing'}{nearest(metric, reported)}"
    )
