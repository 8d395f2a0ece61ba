"""Whole plans of a kind: channels, image, branches, or samples in one part and features in another.

Where a plan is for convolutions, fully connected layers get what `plan.find_plan` finds for them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.tensor.branches import is_block
from orchestray.trainers.tensor.convolution import plan_channels
from orchestray.trainers.tensor.one_weird_trick import convolutional_part
from orchestray.trainers.tensor.plan import find_plan


def channels_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Convolutions split by channels, see `convolution.plan_channels`.

    Args:
        model: the plain one.
        size: workers of the tensor group.
        example: inputs of one micro-batch, see `plan.find_plan`.

    Raises:
        ConfigError: no convolution of an `nn.Sequential` has channels enough.
    """
    plan = plan_channels(model, size)
    if not plan:
        raise ConfigError(
            f"The plan 'channels' found no convolution to split over {size} workers: it looks for convolutions with at "
            "least as many channels in an nn.Sequential. Give the task a tensor_plan, or choose another plan."
        )
    return {**find_plan(model, size=size, example=example), **plan}


def spatial_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """The convolutional part split by the image's rows (columns, if it is one-dimensional); arguments as above."""
    part, inside = convolutional_part(model)
    is_flat = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return {part: "width" if is_flat else "height", **_outside(model, inside, size, example)}


def one_weird_trick_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Samples shared in the convolutional part, features in the fully connected layers that follow (Krizhevsky 2014).

    Arguments as above.
    """
    part, inside = convolutional_part(model)
    return {part: "batch", **_outside(model, inside, size, example)}


def branches_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:  # noqa: ARG001 - as others
    """Every outermost block of independent branches dealt to the workers; arguments as above."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if not any(name.startswith(f"{block}.") or not block for block in plan) and is_block(module, name):
            plan[name] = "branches"
    if not plan:
        raise ConfigError(
            "The plan 'branches' found no block of independent branches: a module that calls several of its children "
            "on its one input and concatenates or adds up what they return. Use "
            "orchestray.trainers.tensor.branches.Branches, or choose another plan."
        )
    return plan


def _outside(model: nn.Module, inside: list[str], size: int, example: Any) -> dict[str, str]:
    """What is found for the modules that are not in the convolutional part."""
    found = find_plan(model, size=size, example=example)
    return {
        name: style
        for name, style in found.items()
        if not any(name == top or name.startswith(f"{top}.") for top in inside)
    }
