"""The way from a config's plan to a split model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.trainers.core.forward import user_code
from orchestray.trainers.core.inputs import call
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.plan import plan_of
from orchestray.trainers.parallel.tensor.verify import evaluating, nothing_hidden

if TYPE_CHECKING:
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.parallel.tensor.base import Plan, Split


def split_over_workers(
    task: Task,
    model: nn.Module,
    kind: str,
    groups: Callable[[], Groups],
    example: Any,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Split:
    """Split the plain model over this worker's tensor group, in place; all its workers call this.

    Args:
        task: the task, which may have its own plan.
        model: the plain model.
        kind: `strategy.network.plan`.
        groups: returns this worker's current groups.
        example: inputs of a micro-batch, the same on every worker of the group.
        precision: returns the context in which the run calls the model.

    Raises:
        ConfigError: the plan does not fit the model or the degree, or changes what the model computes.
        TrainingError: the model cannot take the inputs.
    """
    size = groups().tensor.size
    with user_code(1, groups().rank), nothing_hidden(model), _precision_needed(model, example, precision):
        plan = make_plan(task, model, kind, size, example)
        return split_model(model, plan, lambda: groups().tensor, groups().tensor.rank, size, example=example)


def make_plan(task: Task, model: nn.Module, kind: str, size: int, example: Any = None) -> Plan:
    """Return the styles of a model's modules: those of a built-in kind of plan, the task's, or those found."""
    if kind == "auto":
        return plan_of(task, model, size=size, example=example)
    from orchestray.trainers.parallel.tensor import plans

    makers: dict[str, Callable[..., Plan]] = {
        "channels": plans.channels_plan,
        "spatial": plans.spatial_plan,
        "branches": plans.branches_plan,
        "one_weird_trick": plans.one_weird_trick_plan,
    }
    return makers[kind](model, size=size, example=example)


@contextmanager
def _precision_needed(
    model: nn.Module, example: Any, precision: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Compare in the run's precision if the model works in no other; the full one shows smaller errors of a split."""
    if precision is nullcontext or _works(model, example):
        yield
        return
    with precision():
        torch.set_autocast_cache_enabled(False)  # what passes without gradients cast would have none in later passes
        yield


def _works(model: nn.Module, example: Any) -> bool:
    try:
        with evaluating(model):
            call(model, example)
    except Exception:  # noqa: BLE001 - the user's code: what fails in the run's precision too is reported there
        return False
    return True
