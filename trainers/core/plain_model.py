"""The unsplit model of a task in one process, used to look at its shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.platform.errors import TaskError
from orchestray.trainers.core.rng import seed_everything

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.task import Task


def build_plain(task: Task, seed: int) -> nn.Module:
    """Return the model, without values if possible: most layouts depend on shapes only.

    Raises:
        TaskError: the task's `build_model` fails.
    """
    seed_everything(seed)
    try:
        with torch.device("meta"):
            return task.build_model()
    except Exception:  # noqa: BLE001 - a model may need values, to load some or to compute its sizes
        try:
            return task.build_model()
        except Exception as error:
            raise TaskError(f"build_model() failed: {type(error).__name__}: {error}") from error
