"""The forward pass of many models of one architecture: layer by layer where the model is a sequence, else whole.

`vmap` runs any model, but takes a fully connected layer apart into a product, a copy and an addition, each a pass over
memory, and costs a fraction of a millisecond of its own. So the layers of a plain sequence are computed for all
members at once, each as one batched product, and what is left between them is given to `vmap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Tensors = Mapping[str, Tensor]

_PER_ELEMENT = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
"""What does the same to each number, whatever the shape."""


class StackedModel:
    """Outputs of all members, from their weights and buffers stacked by name, each tensor `[members, *shape]`."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: of one member.
        """
        layers = list(_layers(model, ""))
        known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        if not all(prefix + name in known for prefix, layer in layers for name in _names(layer)):
            layers = [("", model)]  # weights that layers share have one name only
        self._parts = list(_fused([_part(list(alike)) for _, alike in groupby(layers, key=_kind)]))

    def outputs(self, tensors: Tensors, inputs: Tensor, num_members: int) -> Tensor:
        """
        Args:
            tensors: the members' weights and buffers.
            inputs: the same for all members, `[samples, ...]`.
            num_members: how many.

        Returns:
            `[members, samples, ...]`.
        """
        value, is_stacked = inputs, False
        for part in self._parts:
            value, is_stacked = part.apply(value, tensors, is_stacked)
        return value if is_stacked else value.expand(num_members, *value.shape)


class _Linear:
    """One fully connected layer of all members, and the rectifier behind it."""

    def __init__(self, prefix: str, layer: nn.Linear) -> None:
        self.is_rectified = False
        self._weight = f"{prefix}weight"
        self._bias = f"{prefix}bias" if "bias" in dict(layer.named_parameters()) else None

    def apply(self, value: Tensor, tensors: Tensors, is_stacked: bool) -> tuple[Tensor, bool]:
        weight = tensors[self._weight]
        members = len(weight)
        if not is_stacked:
            value = value.expand(members, *value.shape)
        rows = value if value.dim() == 3 else value.reshape(members, -1, value.shape[-1])
        bias = None if self._bias is None else tensors[self._bias]
        made: Tensor = _Product.apply(rows, weight, bias, self.is_rectified)  # type: ignore[no-untyped-call]
        return made.view(*value.shape[:-1], weight.shape[1]), True


class _Product(torch.autograd.Function):
    """`rows @ weight.mT + bias` of all members, rectified or not, with gradients that lie in memory as weights do.

    Autograd's own gradient of a transposed weight lies the other way round, which costs each update three times as
    much; and a rectifier of its own is two more passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, is_rectified: bool) -> Tensor:
        made = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
        ctx.is_rectified = is_rectified
        ctx.save_for_backward(rows, weight, *([made.relu_()] if is_rectified else ()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad], [rows, weight, *made], needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        if ctx.is_rectified:
            grad = torch.ops.aten.threshold_backward(grad, *made, 0)
        return (
            torch.bmm(grad, weight) if needed[0] else None,
            torch.bmm(grad.mT, rows) if needed[1] else None,
            grad.sum(1) if needed[2] else None,
            None,
        )


class _PerElement:
    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.is_rectifier = type(layer) is nn.ReLU

    def apply(self, value: Tensor, tensors: Tensors, is_stacked: bool) -> tuple[Tensor, bool]:
        made: Tensor = self._layer(value)
        return made, is_stacked


class _Mapped:
    """Any other layers, under `vmap`."""

    def __init__(self, layers: list[tuple[str, nn.Module]]) -> None:
        self._layers = layers
        self._names = [(prefix, _names(layer)) for prefix, layer in layers]

    def apply(self, value: Tensor, tensors: Tensors, is_stacked: bool) -> tuple[Tensor, bool]:
        own = [{name: tensors[prefix + name] for name in names} for prefix, names in self._names]

        def run(value: Tensor, *own: dict[str, Tensor]) -> Tensor:
            for (_, layer), its in zip(self._layers, own, strict=True):
                value = functional_call(layer, its, (value,), tie_weights=not _has_twice(layer))
            return value

        if not is_stacked and not any(own):
            return run(value, *own), False
        in_dims = (0 if is_stacked else None, *[0] * len(own))
        made: Tensor = vmap(run, in_dims=in_dims, randomness="same")(value, *own)
        return made, True


_Part = _Linear | _PerElement | _Mapped


def _layers(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, those of sequences in it too, with the prefix of their names; else the model itself."""
    children = list(model.named_children())
    if type(model) is not nn.Sequential or _has_hooks(model) or len(children) != len(model):
        yield prefix, model
        return
    for name, layer in children:
        yield from _layers(layer, f"{prefix}{name}.")


def _names(layer: nn.Module) -> list[str]:
    return [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]


def _kind(named: tuple[str, nn.Module]) -> str:
    prefix, layer = named
    if type(layer) in (nn.Linear, *_PER_ELEMENT) and not _has_hooks(layer):
        return prefix  # alone
    return ""


def _part(layers: list[tuple[str, nn.Module]]) -> _Part:
    prefix, layer = layers[0]
    if not _kind(layers[0]):
        return _Mapped(layers)
    return _Linear(prefix, layer) if isinstance(layer, nn.Linear) else _PerElement(layer)


def _fused(parts: Iterable[_Part]) -> Iterator[_Part]:
    """The same, without rectifiers that a fully connected layer in front of them is."""
    before: _Part | None = None
    for part in parts:
        if isinstance(before, _Linear) and isinstance(part, _PerElement) and part.is_rectifier:
            before.is_rectified, before = True, None
            continue
        yield part
        before = part


def _has_twice(layer: nn.Module) -> bool:
    """Whether it has a module in two places; torch would take its weights for those of two, and put back the wrong."""
    return len(list(layer.named_modules())) != len(list(layer.named_modules(remove_duplicate=False)))


def _has_hooks(layer: nn.Module) -> bool:
    """Whether more is done than its class says."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
