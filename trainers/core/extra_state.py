"""Extra state of modules as tensors: JSON for how it is built, and the tensors in it. Reading it back runs no code."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError

EXTRA = "extra_state"
"""Name of the tensor that has the JSON, and before a slash and a number that of each tensor in the state."""

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: Mapping[str, Callable[[Iterable[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


def encode(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors from which `decode` makes the same values; empty for no values.

    Args:
        values: entries of a `state_dict` besides tensors.

    Raises:
        CheckpointError: a value has a part besides numbers, text, tensors, arrays, and collections of these.
    """
    if not values:
        return {}
    tensors: dict[str, Tensor] = {}
    structure = {name: _encoded(value, tensors, name) for name, value in values.items()}
    data = bytearray(json.dumps(structure).encode())
    return {EXTRA: torch.frombuffer(data, dtype=torch.uint8), **tensors}


def decode(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values that were encoded.

    Raises:
        CheckpointError: the tensors are not those of `encode`.
    """
    if EXTRA not in tensors:
        return {}
    try:
        structure = json.loads(tensors[EXTRA].cpu().numpy().tobytes())
        return {name: _decoded(value, tensors) for name, value in structure.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"The saved extra state of modules is damaged: {error!r}") from error


def of_extra(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors that `encode` has made."""
    return {name: tensor for name, tensor in tensors.items() if name == EXTRA or name.startswith(f"{EXTRA}/")}


def _encoded(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return a value as JSON: itself, or a list of the name of its type and its parts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return [kind.__name__, [_encoded(part, tensors, where) for part in value]]
    if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
        return [
            kind.__name__,
            [[_encoded(k, tensors, where), _encoded(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()],
        ]
    if kind is deque:
        return ["deque", [[_encoded(part, tensors, where) for part in value], value.maxlen]]
    if kind in (bytes, bytearray):
        return [kind.__name__, base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if isinstance(value, torch.dtype | torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return ["Tensor", _kept(value.detach().clone(), tensors)]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        is_array = isinstance(value, np.ndarray)
        return ["ndarray" if is_array else "scalar", _kept(torch.from_numpy(np.array(value)), tensors)]
    raise CheckpointError(
        f"The model's state has a {kind.__name__} in {where}, which no checkpoint can keep. Have get_extra_state() "
        "return numbers, text, tensors, arrays, and lists, tuples, sets or dicts of them."
    )


def _kept(tensor: Tensor, tensors: dict[str, Tensor]) -> int:
    number = len(tensors)
    tensors[f"{EXTRA}/{number}"] = tensor
    return number


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, parts = value
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decoded(part, tensors) for part in parts)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_decoded(key, tensors), _decoded(part, tensors)) for key, part in parts)
    if kind == "deque":
        return deque((_decoded(part, tensors) for part in parts[0]), parts[1])
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(parts)
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*parts)
    if kind == "dtype":
        return getattr(torch, parts)
    if kind == "device":
        return torch.device(parts)
    tensor = tensors[f"{EXTRA}/{parts}"].clone()
    if kind == "Tensor":
        return tensor
    array = tensor.cpu().numpy()
    return array if kind == "ndarray" else array[()]
