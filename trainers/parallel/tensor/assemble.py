"""The way from a config's plan to a split model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.plan import plan_of
from orchestray.trainers.parallel.tensor.verify import nothing_hidden

if TYPE_CHECKING:
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.parallel.tensor.base import Plan, Split


def split_over_workers(task: Task, model: nn.Module, kind: str, groups: Callable[[], Groups], example: Any) -> Split:
    """Split the plain model over this worker's tensor group, in place; all its workers call this.

    Args:
        task: the task, which may have its own plan.
        model: the plain model.
        kind: `strategy.network.plan`.
        groups: returns this worker's current groups.
        example: inputs of a micro-batch, the same on every worker of the group.

    Raises:
        ConfigError: the plan does not fit the model or the degree, or changes what the model computes.
    """
    size = groups().tensor.size
    with nothing_hidden(model):
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
