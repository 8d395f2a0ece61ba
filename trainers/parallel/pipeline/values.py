"""The values between the stages of a pipeline, as tensors: sizes, dtypes, tuples and mappings of tensors as well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.encoders import causal_hint

INPUT = "input"
"""Kind of a value: an input of the first stage, passed on unchanged."""
TENSOR = "tensor"
"""Kind of a value: a tensor, as far as is known without running; it may also be a container of tensors, or nothing."""
_HEADER = b"\0values of a pipeline\0"
_CONTAINERS: Mapping[Any, str] = {tuple: "tuple", list: "list"}
_KINDS = {name: kind for kind, name in _CONTAINERS.items()}


def kind_of(node: fx.Node) -> str:
    """Return a value's kind as far as it is known without running; otherwise "tensor"."""
    if node.op == "placeholder":
        return INPUT
    args = node.args
    if node.op == "call_method":
        if node.target == "size":
            return "int" if len(args) + len(node.kwargs) > 1 else "size"
        return "int" if node.target in {"dim", "numel", "ndimension", "nelement"} else TENSOR
    if node.op != "call_function":
        return TENSOR
    if node.target is causal_hint:
        return "bool"
    if node.target is getattr:
        return {"shape": "size", "ndim": "int", "dtype": "dtype", "device": "device"}.get(str(args[1]), TENSOR)
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") != "_operator" or not args:
        return TENSOR
    if name == "getitem":
        kind = kind_of(args[0]) if isinstance(args[0], fx.Node) else TENSOR
        return TENSOR if kind != "size" else "size" if isinstance(args[1], slice) else "int"
    kinds = {kind_of(arg) if isinstance(arg, fx.Node) else type(arg).__name__ for arg in args}
    if not kinds <= {"int", "float", "bool"}:
        return TENSOR
    if name in {"eq", "ne", "lt", "le", "gt", "ge", "not_"}:
        return "bool"
    return "float" if "float" in kinds or name == "truediv" else "int"


_ENCODE: Mapping[str, Callable[[Any], Any]] = {
    INPUT: lambda value: value,
    TENSOR: lambda value: value,
    "int": lambda value: torch.tensor(value, dtype=torch.int64),
    "float": lambda value: torch.tensor(value, dtype=torch.float64),
    "bool": torch.tensor,
    "size": lambda value: torch.tensor(list(value), dtype=torch.int64),
    "dtype": lambda value: torch.empty(0, dtype=value),
    "device": lambda value: torch.empty(0, device=value),
}
_DECODE: Mapping[str, Callable[[Any], Any]] = {
    INPUT: lambda value: value,
    TENSOR: lambda value: value,
    "int": int,
    "float": float,
    "bool": bool,
    "size": lambda value: torch.Size(value.tolist()),
    "dtype": lambda value: value.dtype,
    "device": lambda value: value.device,
}


def packed(values: Sequence[Any], kinds: Sequence[str], layer: str) -> tuple[Tensor, ...]:
    """Return the tensors by which values travel; if some are containers or None, a last one has their form.

    Args:
        values: values of a stage.
        kinds: kind of each.
        layer: name of the layer that hands them on, for errors.

    Raises:
        ConfigError: a value is neither a tensor nor made of tensors and plain values.
    """
    encoded = [_ENCODE[kind](value) for kind, value in zip(kinds, values, strict=True)]
    if all(isinstance(value, Tensor) for value in encoded):
        return tuple(encoded)
    tensors: list[Tensor] = []
    form = json.dumps([_form(value, tensors, layer) for value in encoded])
    return (*tensors, torch.frombuffer(bytearray(_HEADER + form.encode()), dtype=torch.uint8))


def unpacked(tensors: Sequence[Tensor], kinds: Sequence[str]) -> list[Any]:
    """Return the values that travelled as these tensors."""
    form = _form_in(tensors)
    if form is None:
        if len(tensors) != len(kinds):
            raise ValueError(f"this stage takes {len(kinds)} values, got {len(tensors)}")
        values: list[Any] = [v if kind == INPUT else _alias(v) for v, kind in zip(tensors, kinds, strict=True)]
    else:
        there = iter([_alias(tensor) for tensor in tensors[:-1]])
        values = [_filled(part, there) for part in form]
    return [_DECODE[kind](value) for kind, value in zip(kinds, values, strict=True)]


def _form(value: Any, tensors: list[Tensor], layer: str) -> Any:
    """Return the form of a value, and append its tensors."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"kind": "tensor"}
    if type(value) in _CONTAINERS:
        return {"kind": _CONTAINERS[type(value)], "parts": [_form(part, tensors, layer) for part in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"kind": "dict", "parts": {name: _form(part, tensors, layer) for name, part in value.items()}}
    if isinstance(value, torch.Size):
        return {"kind": "size", "value": list(value)}
    if value is None or type(value) in {bool, int, float, str}:
        return {"kind": "plain", "value": value}
    raise ConfigError(
        f"The layer {layer} hands on a {type(value).__name__}, and between the stages of a pipeline only tensors "
        "travel, and tuples, lists and dictionaries of them. Take out the tensors that later layers need, or cut "
        "elsewhere (strategy.network.split)."
    )


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    kind = form["kind"]
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return form["value"]
    if kind == "size":
        return torch.Size(form["value"])
    if kind == "dict":
        return {name: _filled(part, tensors) for name, part in form["parts"].items()}
    return _KINDS[kind](_filled(part, tensors) for part in form["parts"])


def _form_in(tensors: Sequence[Tensor]) -> Any:
    """Return the form that the last tensor holds, or None if the values are plain tensors."""
    last = tensors[-1] if tensors else None
    if last is None or last.dtype is not torch.uint8 or last.dim() != 1 or last.numel() <= len(_HEADER):
        return None
    text = last.cpu().numpy().tobytes()
    return json.loads(text[len(_HEADER) :]) if text.startswith(_HEADER) else None


def _alias(value: Tensor) -> Tensor:
    """Return a tensor with the same memory that may be changed in place: a leaf that requires gradients may not."""
    return cast(Tensor, cast(Any, _Alias.apply)(value)) if value.requires_grad and value.is_leaf else value


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
