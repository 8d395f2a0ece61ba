"""Conversion of a model's weights to plain named tensors and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.own_saving import load_through_modules, loads_itself, saved_otherwise

_SHOWN = 5
_LEAST_COMPLEX_BYTES = 4
"""Bytes of the parts of the complex numbers that torch computes with everywhere."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return detached, contiguous parameters and persistent buffers, by name and in the order of `state_dict`.

    A tensor that several names share (tied weights) appears once, under the first of them. Contiguous tensors share the
    model's memory: copy them before the model changes.
    """
    return plain_tensors(model.state_dict())


def plain_tensors(saved: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the same of the entries of a `state_dict`.

    Raises:
        CheckpointError: an entry is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, value in saved.items():
        tensor = _checked(name, value)
        key = _identity(tensor)
        if key in seen:
            continue
        if tensor.numel():
            seen.add(key)
        tensors[name] = tensor.detach().contiguous()
    return tensors


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the model, in place.

    Every tensor of the model must be given with its shape (tied ones under any of their names), and no others. Values
    are converted between floating-point dtypes and between complex ones, not between other kinds.

    A model with modules that load themselves gets them by its `load_state_dict`.

    Raises:
        CheckpointError: the tensors do not fit; the model is unchanged, unless it loads itself.
    """
    if loads_itself(model) or saved_otherwise(model):
        load_through_modules(model, tensors, {})
        return
    own = {name: _checked(name, value) for name, value in model.state_dict().items()}
    by_memory: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in own.items():
        by_memory.setdefault(_identity(tensor) if tensor.numel() else (name,), []).append(name)
    missing = [names[0] for names in by_memory.values() if not any(name in tensors for name in names)]
    unexpected = [name for name in tensors if name not in own]
    wrong = [
        f"{name} is {_described(tensors[name])}, the model's is {_described(own[name])}"
        for name in tensors
        if name in own and not _fits(tensors[name], own[name])
    ]
    problems = [
        f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", missing), ("not in the model", unexpected), ("of another kind", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"The saved weights do not fit the model; {'; '.join(problems)}. Build the model from the arguments the "
            "weights were saved with."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def convert(model: nn.Module, precision: torch.dtype) -> nn.Module:
    """Convert the floating-point and complex tensors of a model to a precision, in place, and return the model.

    `model.to(precision)` would drop the imaginary parts.
    """
    cast(Any, model)._apply(lambda tensor: tensor.to(in_precision(tensor.dtype, precision)))
    return model


def in_precision(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """Return the type of the same kind of numbers in a precision: float32 or float64, else complex numbers stay."""
    if dtype.is_floating_point:
        return precision
    return precision.to_complex() if dtype.is_complex and precision.itemsize >= _LEAST_COMPLEX_BYTES else dtype


def _checked(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"The model's state has {name!r} of type {type(value).__name__}; only tensors can be saved. Register it as "
            "a buffer, or leave it out of get_extra_state()."
        )
    return value


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _fits(saved: Tensor, own: Tensor) -> bool:
    same_kind = (saved.dtype.is_floating_point, saved.dtype.is_complex) == (own.is_floating_point(), own.is_complex())
    is_number = saved.dtype.is_floating_point or saved.dtype.is_complex
    return (saved.dtype == own.dtype or (is_number and same_kind)) and saved.shape == own.shape


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
