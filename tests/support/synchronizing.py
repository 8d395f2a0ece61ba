"""The operations at which the CPU waits for a device, found while code runs, with the line of the product."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.layers import ROOMS

_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount")
"""Operations whose result's shape, or whose result, the CPU must know before it goes on."""


class Synchronizing(TorchDispatchMode):
    """A mode that notes each place in the product at which the CPU waits for a device.

    Attributes:
        found: file, function and operation of each, in order.
        num_operations: number of operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        result = func(*args, **(kwargs or {}))
        if text := _waits(func, args, kwargs or {}, result):
            self.found.append((*_caller(), text))
        return result


def _waits(func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
    """Return the name of an operation that waits; None if this one does not."""
    name = func._schema.name.removeprefix("aten::")
    places = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = any(place != "cpu" for place in places)
    if name in {"_to_copy", "to", "copy_"}:
        source, target = (places[1], places[0]) if name == "copy_" else (places[0], result.device.type)
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        if "cpu" not in (source, target) or source == target or given.get("non_blocking"):
            return None
        return "copy to the host" if target == "cpu" else "copy from pageable memory"
    if on_device and name in {"_local_scalar_dense", "item", "is_nonzero"}:
        return "a number is read"
    if on_device and name == "index" and any(leaf.dtype == torch.bool for leaf in args[1] if leaf is not None):
        return "a mask selects"
    return name if on_device and name in _BY_VALUES else None


def _caller() -> tuple[str, str]:
    """Return file and function of the innermost frame of the product."""
    frame = sys._getframe(2)
    while frame is not None:
        parts = frame.f_code.co_filename.split("/")
        rooms = [place for place, part in enumerate(parts) if part in ROOMS and "orchestray" in parts[:place]]
        if rooms:
            # Python 3.12 and later have no frame of a comprehension.
            return "/".join(parts[rooms[-1] :]), frame.f_code.co_qualname.removesuffix(".<locals>.<listcomp>")
        frame = frame.f_back  # type: ignore[assignment]
    return "", ""
