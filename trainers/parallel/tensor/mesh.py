"""Plans from a layout, as in Mesh-TensorFlow: named dimensions of tensors, mapped to the dimensions of a mesh.

Shazeer et al., "Mesh-TensorFlow: Deep Learning for Supercomputers" (2018), section 3: the processors form a mesh, and a
layout says along which of its dimensions each dimension of a tensor is split. Dimensions that it does not name are
whole everywhere. The mesh here is `data` x `tensor`, the degrees of `strategy.network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestray.platform.errors import ConfigError

BATCH = "batch"
"""Name of the dimension of the samples."""


def plan_of_layout(layers: Mapping[str, tuple[str, str]], layout: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of fully connected layers that a layout asks for, as a task's `tensor_plan` returns them.

    A dimension that one layer makes and the next one takes stays split between them. Any other that is split is split
    at the layer's inputs, or gathered after its outputs.

    Args:
        layers: names of the dimensions of each layer's weights, (outputs, inputs), by its name; in the order in which
            the model calls them.
        layout: dimension of the mesh, by the name of the dimension that is split along it.

    Raises:
        ConfigError: the layout names no such dimension, or a layer would be split twice along one of the mesh.
    """
    _check(layers, layout)
    split = {name for name, along in layout.items() if along == "tensor"}
    names = list(layers)
    plan = {}
    for place, (layer, (outputs, inputs)) in enumerate(layers.items()):
        before, after = _dimension(layers, names, place - 1, 0), _dimension(layers, names, place + 1, 1)
        if outputs in split and inputs in split:
            raise ConfigError(
                f"layout: the weights of {layer} have the dimensions {outputs} and {inputs}, and both are mapped to "
                "tensor: leave one of them out, or give them different names and map one"
            )
        if outputs in split:
            plan[layer] = "output" if after == outputs else "output_gathered"
        elif inputs in split:
            plan[layer] = "input" if before == inputs else "input_scattered"
    return plan


def _dimension(layers: Mapping[str, tuple[str, str]], names: Sequence[str], place: int, which: int) -> str | None:
    return layers[names[place]][which] if 0 <= place < len(names) else None


def _check(layers: Mapping[str, tuple[str, str]], layout: Mapping[str, str]) -> None:
    known = dict.fromkeys(dimension for dimensions in layers.values() for dimension in dimensions)
    for name, along in layout.items():
        if name != BATCH and name not in known:
            raise ConfigError(f"layout: the model has no dimension {name}: it has {BATCH}, {', '.join(known)}")
        wanted = "data" if name == BATCH else "tensor"
        if along != wanted:
            raise ConfigError(
                f"layout: {name} can be split along {wanted} of the mesh only, got {along}: samples go along data, and "
                "dimensions of weights along tensor"
            )
