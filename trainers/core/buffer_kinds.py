"""Dtypes and shapes of a model's buffers, which a forward pass may change: a model to restore needs them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Kind = list[Any]
"""Dtype, shape, and True if `state_dict` has the buffer: JSON values."""


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each buffer by its name."""
    return {name: kind_of(owner, leaf, tensor) for name, (owner, leaf, tensor) in places_of(model).items()}


def places_of(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Return module, name there and tensor of each buffer by its name in the model."""
    return {
        f"{path}.{leaf}" if path else leaf: (module, leaf, tensor)
        for path, module in model.named_modules()
        for leaf, tensor in module._buffers.items()
        if tensor is not None
    }


def kind_of(owner: nn.Module, leaf: str, tensor: Tensor) -> Kind:
    is_saved = leaf not in owner._non_persistent_buffers_set
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), is_saved]


def transient(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` leaves out, by name; sparse ones, which no file takes, are left out."""
    return {
        name: tensor
        for name, (owner, leaf, tensor) in places_of(model).items()
        if leaf in owner._non_persistent_buffers_set and tensor.layout == torch.strided
    }


def differences(kinds: Mapping[str, Kind], built: Mapping[str, Kind]) -> dict[str, Kind | None]:
    """Return what `apply_kinds` has to change in a model as it was built; None stands for a buffer that is gone."""
    changed: dict[str, Kind | None] = {name: kind for name, kind in kinds.items() if built.get(name) != kind}
    return changed | {name: None for name in built if name not in kinds}


def apply_kinds(model: nn.Module, kinds: Mapping[str, Kind | None]) -> None:
    """Give buffers these kinds, so that values can be copied into them; those that have them already stay.

    Args:
        model: the model, or a part of it: what a part lacks is ignored.
        kinds: kinds by name; None: there is no such buffer.
    """
    places = places_of(model)
    for name, kind in kinds.items():
        there = places.get(name)
        if there is not None and kind is not None and kind_of(*there) == kind:
            continue
        if kind is None:
            if there is not None:
                there[0]._buffers[there[1]] = None
            continue
        dtype, shape, is_saved = kind
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        _put(model, name, there, empty, is_saved=is_saved)


@torch.no_grad()
def set_values(model: nn.Module, values: Mapping[str, Tensor], *, is_saved: bool = True) -> None:
    """Copy values into buffers by name, in place if they have the dtype and shape; the device is the model's.

    Args:
        model: the model, or a part of it: what a part lacks is ignored.
        values: values by name.
        is_saved: True if `state_dict` is to have a buffer that is not there yet.
    """
    places = places_of(model)
    for name, value in values.items():
        there = places.get(name)
        if there is not None and (there[2].dtype, there[2].shape) == (value.dtype, value.shape):
            there[2].copy_(value)
            continue
        _put(model, name, there, value, is_saved=is_saved)


def _put(
    model: nn.Module, name: str, there: tuple[nn.Module, str, Tensor] | None, tensor: Tensor, *, is_saved: bool
) -> None:
    """Set a buffer to a tensor of any dtype and shape; do nothing if this part of the model lacks its module."""
    if there is not None:
        there[0]._buffers[there[1]] = tensor.to(there[2].device)
        return
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return
    if type(owner) is nn.Module and path:  # an empty place in a part of a cut model
        return
    device = next((held.device for held in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    owner._buffers.pop(leaf, None)
    owner.register_buffer(leaf, tensor.to(device), persistent=is_saved)
