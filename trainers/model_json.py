"""What `model.json` says of a trained model: all that is needed to build it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.consolidation.members import describe_members

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.task import Task
    from orchestray.trainers.settings import ReplicaSettings


def describe_model(settings: ReplicaSettings, task: Task) -> dict[str, Any]:
    """The task with its arguments, and how the model was made."""
    source = settings.task.to_json()
    # What a task found in its data belongs to its model: loading it must not need the data.
    found: Callable[[], dict[str, Any]] = getattr(task, "rebuild_arguments", dict)
    return {
        "task": {**source, "arguments": {**source["arguments"], **found()}},
        "precision": settings.precision,
        "seed": settings.seed,
        **describe_members(settings.num_members, settings.exchange),
    }
