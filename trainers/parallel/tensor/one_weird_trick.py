"""Style `batch`, and the part of a network that "one weird trick" gives it.

A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, sections 3 and 4. Convolutions
have few weights and large activations, so workers divide the samples there. Fully connected layers have many weights
and small activations, so workers divide the features there. Between the two, every worker gathers the activations of
the whole batch (the paper's scheme (a)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.parts import SplitModule, shown
from orchestray.trainers.parallel.tensor.region import (
    BatchArea,
    children_of,
    children_range,
    enclose,
    ends_are_unique,
    inner_name,
    is_sequence,
    prepare,
    sequence_range,
)

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split


def split_batch(module: nn.Module, name: str, split: Split) -> None:
    """Split a module so that each worker computes a part of the samples of every micro-batch.

    Args:
        module: takes and returns a tensor with the samples first.
        name: its name, or that of a range of children of an `nn.Sequential`, such as `features.0:5` or `0:5`.
        split: the model being split (see `base`).
    """
    container, chosen = children_range(name)
    if isinstance(module, SplitModule):
        raise ConfigError(f"The plan splits the module {container!r} twice; give it one style.")
    area = BatchArea(split, name)
    if chosen is None and is_sequence(module) and ends_are_unique(module):
        chosen = slice(0, None)
    if chosen is None:
        prepare([("", module)], area, container)
        enclose(module, area, None)
        return
    bounds = sequence_range(module, name, chosen)
    prepare(children_of(module, bounds, name), area, container)
    enclose(module, area, bounds)


def convolutional_part(model: nn.Module, name: str = "") -> tuple[str, list[str]]:
    """Return the name in a plan of the model's convolutional part, and the names of its modules.

    It is what comes before the first `nn.Flatten` or `nn.Linear` of an `nn.Sequential`. For another model it is the one
    child with convolutions.

    Raises:
        ConfigError: such a part is not found, or not unique.
    """
    children = [(child_name, child) for child_name, child in model._modules.items() if child is not None]
    stop = next((index for index, (_, child) in enumerate(children) if _leaves_images(child)), len(children))
    while stop and isinstance(children[stop - 1][1], _DropoutNd):
        stop -= 1  # dropout works as well on the whole
    if not is_sequence(model):
        found = [child_name for child_name, child in children if _has_convolutions(child)]
        if not found:
            raise ConfigError(
                f"{shown(name)} has no convolutions, which this plan splits. Use plan: auto, or say in the task's "
                "tensor_plan what is to be split."
            )
        if len(found) > 1:
            raise ConfigError(
                f"{shown(name)} has {len(found)} children with convolutions, so its convolutional part cannot be told. "
                "Put it in one nn.Sequential, or say in the task's tensor_plan which modules get the style 'batch'."
            )
        child = model.get_submodule(found[0])
        full_name = inner_name(name, found[0])
        return convolutional_part(child, full_name) if _leaves_images(child) else (full_name, [full_name])
    if stop == 0 and children:
        first_name, first = children[0]
        if any(True for _ in first.children()):
            return convolutional_part(first, inner_name(name, first_name))
    inside = [inner_name(name, child_name) for child_name, _ in children[:stop]]
    if not any(_has_convolutions(child) for _, child in children[:stop]):
        raise ConfigError(f"{shown(name)} begins with no convolutions, so it has no convolutional part to share.")
    if stop == 1 or (stop == len(children) and name):
        return (inside[0] if stop == 1 else name), inside
    return inner_name(name, f"0:{stop}"), inside


def _leaves_images(module: nn.Module) -> bool:
    """Return True if a part of the module turns images into features."""
    return any(isinstance(part, nn.Flatten | nn.Linear) for part in module.modules())


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(part, _ConvNd) for part in module.modules())
