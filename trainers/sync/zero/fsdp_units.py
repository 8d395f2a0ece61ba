"""The choice of modules whose parameters are gathered together: each repeated block, the rest with the root."""

from __future__ import annotations

from collections import Counter

from torch import nn

from orchestray.trainers.core.parameter_uses import is_used_from_outside

SMALLEST_UNIT_BYTES = 1 << 14
"""Fewest bytes of a unit; a smaller module is gathered with the root, because its memory is not worth the time."""


def unit_modules(model: nn.Module, smallest_bytes: int = SMALLEST_UNIT_BYTES) -> list[nn.Module]:
    """Return the modules whose parameters are gathered when they are called, and freed after; in the model's order.

    They are the parts of the model's top structure: children of `nn.Sequential`s, items of `nn.ModuleList`s and
    `nn.ModuleDict`s. A module that holds such lists is divided into its children, down to the first that hold none.
    Examples are the blocks and embeddings of a transformer, the blocks of a residual network, the layers of a
    perceptron.

    The rest stays with the root, which keeps its parameters gathered during a whole forward or backward pass: all else,
    modules with less than `smallest_bytes` of parameters, and those whose parameters others use as well. These are tied
    weights, and modules that are marked as used from outside.
    """
    found: list[nn.Module] = []
    _collect(model, found, set())
    uses = Counter(id(parameter) for unit in found for parameter in {id(p): p for p in unit.parameters()}.values())
    used_outside = _ids_outside(model, found)

    def is_apart(unit: nn.Module) -> bool:
        parameters = list(unit.parameters())
        is_shared = any(uses[id(parameter)] > 1 or id(parameter) in used_outside for parameter in parameters)
        is_large = sum(parameter.nbytes for parameter in parameters) >= smallest_bytes
        return is_large and not is_shared and not is_used_from_outside(unit)

    return [unit for unit in found if is_apart(unit)]


def _collect(module: nn.Module, found: list[nn.Module], seen: set[int]) -> None:
    for child in module.children():
        if id(child) in seen or next(child.parameters(), None) is None:
            continue
        seen.add(id(child))
        is_container = isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        holds_list = not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(
            isinstance(inner, nn.ModuleList) for inner in child.modules()
        )
        if is_container or holds_list:
            _collect(child, found, seen)
        else:
            found.append(child)


def _ids_outside(model: nn.Module, units: list[nn.Module]) -> set[int]:
    """Return the ids of parameters that modules outside the units hold themselves."""
    inside = {id(module) for unit in units for module in unit.modules()}
    return {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
