"""The content of `model.json` of a trained model: all that is needed to build the model again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.core.members import describe_members

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings


def describe_model(
    settings: ReplicaSettings, task: Task, task_of: Callable[[int], Task] | None = None
) -> dict[str, Any]:
    """Return the task with its arguments, and the settings that the model was built with.

    Args:
        settings: settings of the run.
        task: the trained task.
        task_of: returns the task of a member of an ensemble; default: `task`.
    """
    own = None
    if settings.has_own_tasks and task_of is not None:
        own = [_arguments(settings.task_of(index).arguments, task_of(index)) for index in range(settings.num_members)]
    source = settings.task.as_imported().to_json()
    return {
        "task": {**source, "arguments": _arguments(source["arguments"], task)},
        "precision": settings.precision,
        "seed": settings.seed,
        **describe_members(settings.num_members, settings.exchange, own),
    }


def _arguments(given: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return a task's arguments, with those that it derived from its data.

    The model is later loaded without the data.
    """
    found: Callable[[], dict[str, Any]] = getattr(task, "rebuild_arguments", dict)
    return {**given, **found()}
