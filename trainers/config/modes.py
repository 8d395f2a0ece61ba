"""The direction of the metrics that a config names: by their names, or by the list in the task's own file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.metric_names import mode_of_metric
from orchestray.trainers.config.task_lint import lower_is_better

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig

GOALS = ("train.until", "train.early_stopping", "checkpoint.best")
"""Keys that name a metric of the validation."""


def with_modes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data of a training config in which metrics of the user's own task have their `mode`.

    It is filled in where the name of the metric says nothing and the task's `lower_is_better` does. The data itself is
    unchanged.
    """
    made, task_type = dict(data), type_of_task(data)
    for section, _, key in (goal.partition(".") for goal in GOALS):
        holder = made.get(section)
        if isinstance(holder, Mapping) and isinstance(goal := holder.get(key), Mapping):
            made[section] = {**holder, key: with_mode(goal, task_type)}
    return made


def with_mode(goal: Mapping[str, Any], task_type: object) -> dict[str, Any]:
    """Return plain data of a goal or objective with its `mode`, if the task says it.

    Args:
        goal: `metric` and perhaps `mode`, and other keys.
        task_type: `task.type` of the config; a file in it must be an absolute path.
    """
    metric = goal.get("metric")
    if goal.get("mode") is not None or not isinstance(metric, str) or not isinstance(task_type, str):
        return dict(goal)
    listed = lower_is_better(task_type)
    mode = None if listed is None else mode_of_metric(metric, listed)
    return dict(goal) if mode is None else {**goal, "mode": mode}


def type_of_task(data: Mapping[str, Any]) -> object:
    """Return `task.type` of a training config's plain data; None if it is missing."""
    task = data.get("task")
    return task.get("type") if isinstance(task, Mapping) else getattr(task, "type", None)


def goals_text(config: TrainConfig) -> str:
    """Return for example `train.until accuracy (max)`: the goals of a run with their directions; empty without any."""
    goals: dict[str, Any] = {key: reduce(getattr, key.split("."), config) for key in GOALS}
    return ", ".join(f"{key} {goal.metric} ({goal.mode})" for key, goal in goals.items() if goal is not None)


def mode_is_missing(metric: str) -> str:
    """Return the problem of a `mode` that is left out where nothing says it."""
    return (
        f"is required, and missing: the name {metric!r} does not say whether higher or lower is better; write "
        "mode: max or mode: min (or list what is better when lower in lower_is_better of your task)"
    )
