"""Whole plans of one kind: channels, image, branches, or samples in one part and features in another.

If a plan is for convolutions, fully connected layers get what `plan.find_plan` finds for them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.inputs import call
from orchestray.trainers.parallel.tensor.branches import is_block
from orchestray.trainers.parallel.tensor.convolution import plan_channels
from orchestray.trainers.parallel.tensor.one_weird_trick import convolutional_part
from orchestray.trainers.parallel.tensor.plan import find_plan
from orchestray.trainers.parallel.tensor.region import children_range, inner_name, is_sequence
from orchestray.trainers.parallel.tensor.shapes import meta_copy, meta_like
from orchestray.trainers.parallel.tensor.spatial import num_fitting


def channels_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Split convolutions by channels, see `convolution.plan_channels`.

    Args:
        model: the plain model.
        size: number of workers in the tensor group.
        example: inputs of one micro-batch (see `plan.find_plan`).

    Raises:
        ConfigError: no convolution in an `nn.Sequential` has enough channels.
    """
    plan = plan_channels(model, size)
    if not plan:
        raise ConfigError(
            f"The plan 'channels' found no convolution to split over {size} workers: it looks for convolutions with at "
            "least as many channels in an nn.Sequential. Give the task a tensor_plan, or choose another plan."
        )
    return {**find_plan(model, size=size, example=example), **plan}


def spatial_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Split the convolutional part by the image's rows (columns if it is one-dimensional), as far as there are enough.

    Arguments are those of `channels_plan`; without an example the number of rows is not known.
    """
    part, inside = convolutional_part(model)
    style, dim = ("width", -1) if any(isinstance(module, nn.Conv1d) for module in model.modules()) else ("height", -2)
    name, _ = children_range(part)
    container = model.get_submodule(name)
    if is_sequence(container):
        children = [(child_name, child) for child_name, child in container._modules.items() if child is not None]
        children = children[: len(inside)]
        x = _input_of(model, inside[0], example)
        count = num_fitting(children, dim, x, size)
        if count == 0:
            raise ConfigError(
                f"The plan 'spatial' cannot split {part!r} by its image's {'columns' if dim == -1 else 'rows'} over "
                f"{size} workers: its first layer does not work on tiles, or there are too few. Choose another plan, "
                "or a lower tensor degree."
            )
        part, inside = inner_name(name, f"0:{count}"), [inner_name(name, child) for child, _ in children[:count]]
    return {part: style, **_outside(model, inside, size, example)}


def _input_of(model: nn.Module, name: str, example: Any) -> Tensor | None:
    """Return the input of the module `name`, with the right shape only; None if it is not known."""
    if example is None:
        return None
    plain, found = meta_copy(model), []
    handle = plain.get_submodule(name).register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad(), contextlib.suppress(Exception):
        call(plain, map_tensors(lambda tensor: meta_like(tensor, plain), example))
    handle.remove()
    return found[0] if found and isinstance(found[0], Tensor) else None


def one_weird_trick_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Divide samples in the convolutional part, and features in the fully connected layers after it (Krizhevsky 2014).

    Arguments are those of `channels_plan`.
    """
    part, inside = convolutional_part(model)
    return {part: "batch", **_outside(model, inside, size, example)}


def branches_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:  # noqa: ARG001 - as others
    """Assign every outermost block of independent branches to the workers; arguments are those of `channels_plan`."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if not any(name.startswith(f"{block}.") or not block for block in plan) and is_block(module, name):
            plan[name] = "branches"
    if not plan:
        raise ConfigError(
            "The plan 'branches' found no block of independent branches: a module that calls several of its children "
            "on its one input and concatenates or adds up what they return. Use "
            "orchestray.trainers.parallel.tensor.branches.Branches, or choose another plan."
        )
    return plan


def _outside(model: nn.Module, inside: list[str], size: int, example: Any) -> dict[str, str]:
    """Return the styles found for the modules outside the convolutional part."""
    found = find_plan(model, size=size, example=example)
    return {
        name: style
        for name, style in found.items()
        if not any(name == top or name.startswith(f"{top}.") for top in inside)
    }
