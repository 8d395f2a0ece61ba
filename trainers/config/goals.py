"""Goals on the metrics of a validation: the end of a run, and the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestray.platform.config.problems import nearest
from orchestray.platform.errors import ConfigError


@dataclass(frozen=True)
class Until:
    """A goal that ends the run: a validation metric of at least (`max`) or at most (`min`) a value."""

    metric: str
    value: float
    mode: str

    def reached(self, validation: Mapping[str, Any]) -> bool:
        """Return True if a validation has reached the goal.

        Args:
            validation: means of the metrics, by name.

        Raises:
            ConfigError: the validation does not have the metric of the goal.
        """
        value = _metric(validation, self.metric, "train.until.metric")
        return value >= self.value if self.mode == "max" else value <= self.value


@dataclass(frozen=True)
class EarlyStop:
    """An end of the run after `patience` validations in a row that were not better than the best by `min_delta`."""

    metric: str
    patience: int
    min_delta: float
    mode: str

    def after(self, best: float | None, num_worse: int, validation: Mapping[str, Any]) -> tuple[float | None, int]:
        """Return the best value, and the number of validations since it. A value that is not a number is never better.

        Args:
            best: best value before; None: there was none.
            num_worse: number of validations since then.
            validation: means of the metrics of the next validation, by name.

        Raises:
            ConfigError: the validation does not have the metric.
        """
        value = _metric(validation, self.metric, "train.early_stopping.metric")
        gain = math.inf if best is None else value - best if self.mode == "max" else best - value
        if math.isnan(value) or gain <= self.min_delta:
            return best, num_worse + 1
        return value, 0


@dataclass(frozen=True)
class Best:
    """The choice of the checkpoint with the best value of a validation metric."""

    metric: str
    mode: str
    export: bool = True
    """True if the run's model is the one of that checkpoint."""

    def after(self, best: Mapping[str, Any] | None, step: int, validation: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the best checkpoint once the run has validated after a step.

        A value that is not a number is never better. The best by another metric or mode does not count.

        Args:
            best: best checkpoint before, as returned; None: there is none.
            step: step of the validation.
            validation: means of the metrics, by name.

        Returns:
            `step`, `metric`, `mode` and `value`, or None; JSON values.

        Raises:
            ConfigError: the validation does not have the metric.
        """
        value = _metric(validation, self.metric, "checkpoint.best.metric")
        known = None if best is None or (best["metric"], best["mode"]) != (self.metric, self.mode) else dict(best)
        is_better = known is None or (value > known["value"] if self.mode == "max" else value < known["value"])
        if math.isnan(value) or not is_better:
            return known
        return {"step": step, "metric": self.metric, "mode": self.mode, "value": value}


def refuse_without_validation(goals: Iterable[str], num_samples: int) -> None:
    """Refuse goals on a validation if there is none.

    Args:
        goals: keys of the config's goals.
        num_samples: number of validation samples.

    Raises:
        ConfigError: there is a goal, and there are no samples.
    """
    for key in goals:
        if not num_samples:
            raise ConfigError(
                f"config: {key}: it takes a validation, and the task has no validation data (its dataset('validation') "
                f"returns None, or no rows); take {key} out, or return some"
            )


def _metric(validation: Mapping[str, Any], name: str, key: str) -> float:
    """Return a metric of a validation; refuse a name that it does not have."""
    if name not in validation:
        known = ", ".join(sorted(validation)) or "none"
        hint = nearest(name, validation)
        raise ConfigError(f"config: {key}: the task has no metric {name!r}{hint} (it has: {known})")
    return float(validation[name])
