"""Checks that a teacher fits a student, before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.platform.data.source import first_row
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.core.inputs import call, inputs_of
from orchestray.trainers.core.rng import building
from orchestray.trainers.distill.distillation import DistilledTask, load_teacher

if TYPE_CHECKING:
    from orchestray.platform.task import Batch, Task
    from orchestray.trainers.config.schema import TrainConfig


def teacher_problems(config: TrainConfig) -> list[str]:
    """Return the problems of a config's teacher, as lines "config: distill.teacher: <sentence>".

    A task that cannot be built here (only the cluster's machines may have its data) yields none.
    """
    if config.distill is None:
        return []
    try:
        teacher = load_teacher(config.distill.teacher, double=False)
    except OrchestrayError as error:
        return [f"config: distill.teacher: {str(error).strip()}"]
    try:
        task = tasks.build(TaskSource.from_config(config.task, config.train.quantize))
        batch: Any = task.to_batch(first_row(task))
        with building(config.train.seed):
            student = task.build_model().eval()
    except Exception:  # noqa: BLE001 - the user's code; its failure is explained when the run starts
        return []
    try:
        compare(task, student, teacher, batch)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    except Exception:  # noqa: BLE001 - the student itself fails
        return []
    return []


@torch.no_grad()
def compare(task: Task, student: nn.Module, teacher: nn.Module, batch: Batch) -> None:
    """Compare a teacher's outputs with a student's, both in evaluation mode.

    Args:
        task: the student's task.
        student: the model to train.
        teacher: the trained model.
        batch: a batch of the task.

    Raises:
        ConfigError: the student cannot learn from the teacher's outputs.
    """
    DistilledTask(task, lambda: teacher, weight=1.0).loss(call(student, inputs_of(batch)), batch)
