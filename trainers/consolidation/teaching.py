"""Whether a teacher fits a student: looked at before a process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.platform.data.source import open_source
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.consolidation.distillation import DistilledTask, load_teacher
from orchestray.trainers.replica.randomness import building

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.platform.task import Task


def teacher_problems(config: TrainConfig) -> list[str]:
    """What is wrong with the teacher of a config, as lines "config: distill.teacher: <sentence>".

    A task that cannot be built here (its data may be on the cluster's machines alone) is no problem of the teacher:
    nothing is said of it.
    """
    if config.distill is None:
        return []
    try:
        teacher = load_teacher(config.distill.teacher, double=False)
    except OrchestrayError as error:
        return [f"config: distill.teacher: {str(error).strip()}"]
    try:
        task = tasks.build(TaskSource.from_config(config.task))
        batch: Any = task.to_batch(open_source(task.dataset("train"), split="train").first_row())
        with building(config.train.seed):
            student = task.build_model().eval()
    except Exception:  # noqa: BLE001 - the user's code; its failure has sentences of its own when the run starts
        return []
    try:
        compare(task, student, teacher, batch)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    except Exception:  # noqa: BLE001 - the student itself fails
        return []
    return []


@torch.no_grad()
def compare(task: Task, student: nn.Module, teacher: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Hold a teacher's outputs against a student's, both in evaluation mode.

    Raises:
        ConfigError: the student cannot learn from them.
    """
    DistilledTask(task, lambda: teacher, weight=1.0).loss(student(batch["inputs"]), batch)
