"""The unsplit model of a task in one process."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from orchestray.platform.errors import TaskError
from orchestray.trainers.core.rng import seed_everything

if TYPE_CHECKING:
    from orchestray.platform.task import Task


def build_model(task: Task) -> nn.Module:
    """Return the model of a task, which has values to train.

    Raises:
        TaskError: `build_model` returns something else, or a tensor of the model has no shape or no values yet.
    """
    model: object = task.build_model()
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TaskError(f"The task's build_model() must return a torch.nn.Module, got {got}.")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(
                f"{name} of the model has no shape yet, as its layer is a lazy one. Call the model in build_model(), "
                "under torch.no_grad(), with inputs of the shapes that it will get, before you return it."
            )
        if tensor.is_meta and torch.get_default_device().type != "meta":
            raise TaskError(
                f"{name} of the model has no values, as it is on the device meta. Build the model without "
                "torch.device('meta'), or call its to_empty(device='cpu') in build_model() and set its values."
            )
    return model


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
