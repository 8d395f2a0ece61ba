"""Style `batch`, and Krizhevsky's plan of a whole network, "one weird trick".

A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, sections 3 and 4: convolutions
have few weights and large activations, so workers share the samples there; fully connected layers have many weights and
small activations, so workers share the features there. Between the two the activations are gathered (scheme (a) of
section 4.1: every worker gets the whole batch's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.conv import _ConvNd

from orchestray.platform.errors import ConfigError
from orchestray.trainers.tensor.area import (
    BatchArea,
    children_range,
    enclose,
    inner_name,
    is_sequence,
    prepare,
    sequence_range,
)
from orchestray.trainers.tensor.parts import SplitModule, shown

if TYPE_CHECKING:
    from typing import Any

    from orchestray.trainers.tensor.base import Split


def split_batch(module: nn.Module, name: str, split: Split) -> None:
    """Each worker computes a part of the samples of every micro-batch.

    Args:
        module: takes and returns a tensor with the samples first.
        name: its name; or that of a range of children of an `nn.Sequential`, such as `features.0:5` or `0:5`.
        split: see `base`.
    """
    container, chosen = children_range(name)
    if isinstance(module, SplitModule):
        raise ConfigError(f"The plan splits the module {container!r} twice; give it one style.")
    area = BatchArea(split, name)
    if chosen is None:
        prepare([("", module)], area, container)
        enclose(module, area, None)
        return
    bounds = sequence_range(module, name, chosen)
    prepare(list(module.named_children())[slice(*bounds)], area, container)
    enclose(module, area, bounds)


def one_weird_trick_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Samples shared in the convolutional part, features in the fully connected layers that follow.

    Args:
        model: the plain one; its convolutional part is what comes before the first `nn.Flatten` or `nn.Linear` of an
            `nn.Sequential`, or else the one child that has convolutions.
        size: workers of the tensor group.
        example: inputs of one micro-batch, see `plan.find_plan`.

    Raises:
        ConfigError: no such part can be told.
    """
    from orchestray.trainers.tensor.plan import find_plan

    part, inside = convolutional_part(model)
    found = find_plan(model, size=size, example=example)
    after = {
        name: style
        for name, style in found.items()
        if not any(name == top or name.startswith(f"{top}.") for top in inside)
    }
    return {part: "batch", **after}


def convolutional_part(model: nn.Module, name: str = "") -> tuple[str, list[str]]:
    """Its name in a plan, and the names of the modules it is made of; see `one_weird_trick_plan`."""
    children = list(model.named_children())
    stop = next((index for index, (_, child) in enumerate(children) if _leaves_images(child)), len(children))
    if not is_sequence(model):
        found = [child_name for child_name, child in children if _has_convolutions(child)]
        if len(found) != 1:
            raise ConfigError(
                f"{shown(name)} has {len(found)} children with convolutions, so its convolutional part cannot be told. "
                "Put it in one nn.Sequential, or say in the task's tensor_plan which modules get the style 'batch'."
            )
        child = model.get_submodule(found[0])
        full_name = inner_name(name, found[0])
        return convolutional_part(child, full_name) if _leaves_images(child) else (full_name, [full_name])
    if stop == 0 and children and list(children[0][1].children()):
        return convolutional_part(children[0][1], inner_name(name, children[0][0]))
    inside = [inner_name(name, child_name) for child_name, _ in children[:stop]]
    if not any(_has_convolutions(child) for _, child in children[:stop]):
        raise ConfigError(f"{shown(name)} begins with no convolutions, so it has no convolutional part to share.")
    if stop == 1 or (stop == len(children) and name):
        return (inside[0] if stop == 1 else name), inside
    return inner_name(name, f"0:{stop}"), inside


def _leaves_images(module: nn.Module) -> bool:
    """Whether something within turns images into features."""
    return any(isinstance(part, nn.Flatten | nn.Linear) for part in module.modules())


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(part, _ConvNd) for part in module.modules())
