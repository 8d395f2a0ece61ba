"""From a config's plan to a split model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.trainers.tensor.apply import split_model
from orchestray.trainers.tensor.check import nothing_hidden
from orchestray.trainers.tensor.plan import plan_of

if TYPE_CHECKING:
    from orchestray.platform.task import Task
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.tensor.base import Plan, Split


def split_over_workers(task: Task, model: nn.Module, kind: str, groups: Callable[[], Groups], example: Any) -> Split:
    """Split the plain model over this worker's tensor group, in place; all its workers call.

    Args:
        task: which may have a plan of its own.
        model: the plain model.
        kind: `strategy.network.plan`.
        groups: gives this worker's groups of the moment.
        example: inputs of a micro-batch, the same on every worker of the group.

    Raises:
        ConfigError: the plan does not fit the model or the degree, or changes what the model computes.
    """
    size = groups().tensor.size
    with nothing_hidden(model):
        plan = make_plan(task, model, kind, size, example)
        return split_model(model, plan, lambda: groups().tensor, groups().tensor.rank, size, example=example)


def make_plan(task: Task, model: nn.Module, kind: str, size: int, example: Any = None) -> Plan:
    """The styles of a model's modules for one of the built-in kinds of plan, or as the task or the search says."""
    if kind == "auto":
        return plan_of(task, model, size=size, example=example)
    from orchestray.trainers.tensor import plans

    makers: dict[str, Callable[..., Plan]] = {
        "channels": plans.channels_plan,
        "spatial": plans.spatial_plan,
        "branches": plans.branches_plan,
        "one_weird_trick": plans.one_weird_trick_plan,
    }
    return makers[kind](model, size=size, example=example)
