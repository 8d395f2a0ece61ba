"""What shapes a part of a model computes, found on torch's meta device: nothing is computed and nothing is kept."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy without memory. Normalisation and dropout, which change no shape and ask for real data, are left out."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _on_meta(tensor)
    copied = copy.deepcopy(module, memo)
    for part in list(copied.modules()):
        for name, child in part.named_children():
            if isinstance(child, _BatchNorm | _DropoutNd):
                setattr(part, name, nn.Identity())
    return nn.Identity() if isinstance(copied, _BatchNorm | _DropoutNd) else copied


def meta_like(x: Tensor, module: nn.Module) -> Tensor:
    """An input of the shape of `x`, in the precision of the meta copy `module`."""
    weight = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    dtype = weight.dtype if weight is not None and x.is_floating_point() else x.dtype
    return torch.empty(x.shape, dtype=dtype, device="meta")


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def has_forward_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module is of one of some kinds, and computes what that kind does."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
