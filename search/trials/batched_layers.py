"""The forward pass of many models of one architecture, layer by layer where the model is a sequence.

`vmap` runs any model. But it splits a fully connected layer into a product, a copy and an addition, each a pass over
memory. It also has a fixed cost of a fraction of a millisecond. The layers of a plain sequence are therefore computed
for all members at once, each as one batched product. Only the layers between them run under `vmap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Tensors = Mapping[str, Tensor]

_PER_ELEMENT = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
"""Modules that apply the same function to each element, whatever the shape."""


class StackedModel:
    """The forward pass of all members, with their weights and buffers stacked by name: each `[members, *shape]`."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: model of one member.
        """
        layers = list(_layers(model, ""))
        known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        if not all(prefix + name in known for prefix, layer in layers for name in _names(layer)):
            layers = [("", model)]  # shared weights are registered under one name only
        self._parts = list(_fused([_part(list(alike)) for _, alike in groupby(layers, key=_kind)]))

    def outputs(self, tensors: Tensors, inputs: Tensor, num_members: int) -> Tensor:
        """Return the outputs of all members.

        Args:
            tensors: weights and buffers of the members.
            inputs: inputs that all members share, `[samples, ...]`.
            num_members: number of members.

        Returns:
            `[members, samples, ...]`.
        """
        value, is_stacked = inputs, False
        for part in self._parts:
            value, is_stacked = part.apply(value, tensors, is_stacked)
        return value if is_stacked else value.expand(num_members, *value.shape)


class _Linear:
    """A fully connected layer of all members, fused with the ReLU after it.

    The gradient of that ReLU is left to the next layer if it is fully connected too: it has just made the gradient of
    its inputs, so that zeroing a part in place takes no further pass over memory.
    """

    def __init__(self, prefix: str, layer: nn.Linear) -> None:
        self.rectified = _Rectified()
        self._weight = f"{prefix}weight"
        self._bias = f"{prefix}bias" if "bias" in dict(layer.named_parameters()) else None

    def apply(self, value: Tensor, tensors: Tensors, is_stacked: bool) -> tuple[Tensor, bool]:
        weight = tensors[self._weight]
        members = len(weight)
        if not is_stacked:
            value = value.expand(members, *value.shape)
        rows = value if value.dim() == 3 else value.reshape(members, -1, value.shape[-1])
        bias = None if self._bias is None else tensors[self._bias]
        made: Tensor = _Product.apply(rows, weight, bias, self.rectified)  # type: ignore[no-untyped-call]
        return made.view(*value.shape[:-1], weight.shape[1]), True


@dataclass
class _Rectified:
    """The ReLUs that a fully connected layer is fused with."""

    outputs: bool = False
    """True if a ReLU follows."""
    inputs: bool = False
    """True if the inputs are those of a layer that leaves the gradient of its ReLU to this one."""
    is_left: bool = False
    """True if the next layer computes the gradient of the ReLU that follows."""


class _Product(torch.autograd.Function):
    """The product `rows @ weight.mT + bias` of all members, with optional ReLU and gradients laid out like weights.

    Autograd's own gradient of a transposed weight has a transposed memory layout, which makes each update three times
    slower. A separate ReLU would take two more passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, rectified: _Rectified) -> Tensor:
        made = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
        ctx.rectified = rectified
        if rectified.outputs:
            made.relu_()
        is_needed = rectified.outputs and not rectified.is_left
        ctx.save_for_backward(rows, weight, *([made] if is_needed else ()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad], [rows, weight, *made], needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        if made:
            grad = torch.ops.aten.threshold_backward(grad, *made, 0)
        of_rows = torch.bmm(grad, weight) if needed[0] else None
        if of_rows is not None and ctx.rectified.inputs:
            torch.ops.aten.threshold_backward.grad_input(of_rows, rows, 0, grad_input=of_rows)
        return (
            of_rows,
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
    """A group of any other layers, run under `vmap`."""

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
    """Yield the layers of a (nested) sequence with the prefix of their names; otherwise the model itself."""
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
    """Yield the parts, without ReLUs that the preceding fully connected layer computes."""
    before: _Part | None = None
    for part in parts:
        if isinstance(before, _Linear) and isinstance(part, _PerElement) and part.is_rectifier:
            if not before.rectified.outputs:
                before.rectified.outputs = True
                continue
        elif isinstance(before, _Linear) and isinstance(part, _Linear) and before.rectified.outputs:
            before.rectified.is_left = part.rectified.inputs = True
        yield part
        before = part


def _has_twice(layer: nn.Module) -> bool:
    """Return True if a module occurs twice in the layer: torch would restore the wrong weights after the call."""
    return len(list(layer.named_modules())) != len(list(layer.named_modules(remove_duplicate=False)))


def _has_hooks(layer: nn.Module) -> bool:
    """Return True if hooks extend what its class does."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
