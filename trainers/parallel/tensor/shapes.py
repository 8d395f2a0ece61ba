"""Shapes of what a part of a model computes, found on torch's meta device: nothing is computed and nothing is kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy without memory and without hooks. Batch normalisation and dropout, which change no shape and need
    real data, become identities.
    """
    return _Copier().copied(module)


class _Copier:
    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}

    def copied(self, module: nn.Module) -> nn.Module:
        if isinstance(module, _BatchNorm | _DropoutNd):
            return nn.Identity()
        if id(module) in self._modules:
            return self._modules[id(module)]
        kind = type(module)
        copied = self._modules[id(module)] = kind.__new__(kind)
        for name, value in vars(module).items():
            vars(copied)[name] = type(value)() if "_hooks" in name and isinstance(value, dict) else self._value(value)
        return copied

    def _value(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.copied(value)
        if isinstance(value, Tensor):
            return self._on_meta(value)
        if type(value) in {dict, OrderedDict}:
            return type(value)((key, self._value(item)) for key, item in value.items())
        if type(value) is list:
            return [self._value(item) for item in value]
        return value

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._tensors[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return self._tensors[id(tensor)]


def meta_like(x: Tensor, module: nn.Module) -> Tensor:
    """Return an input of the shape of `x`, in the precision of the meta copy `module`."""
    weight = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    dtype = weight.dtype if weight is not None and x.is_floating_point() else x.dtype
    return torch.empty(x.shape, dtype=dtype, device="meta")


def has_forward_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return True if the module is of one of these kinds and has that kind's own forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
