"""A training step in numbers: its operations, its bytes and its products of matrices, counted without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.analysis.trace import Recorder

_aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """A product of matrices [m, k] and [k, n], done `count` times."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Counted:
    """The forward and backward pass of a mini-batch, counted."""

    work: int
    """Scalar operations; a multiplication and an addition are two."""
    num_bytes: int
    """Bytes that its operations read and write."""
    products: tuple[Product, ...]
    parameter_bytes: int
    """Bytes of the trained parameters, and so of their gradients."""


def counted(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Counted:
    """Count a forward and a backward pass.

    Args:
        forward: returns the loss; with a model and inputs on `meta`, nothing is computed.
        parameters: parameters of the model; their gradients are dropped, as additions to them would be counted.
    """
    trained = [each for each in parameters if each.requires_grad]
    for each in trained:
        each.grad = None
    with _Products() as recorder:
        forward().backward()  # type: ignore[no-untyped-call]
    operations = recorder.graph.operations
    return Counted(
        recorder.graph.work,
        sum(each.num_bytes for each in operations),
        tuple(recorder.products),
        sum(each.numel() * each.element_size() for each in trained),
    )


class _Products(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that keeps the shapes of products of matrices as well."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (products_of := _PRODUCTS.get(func.overloadpacket)) is not None:
            self.products += products_of(*args, out=out)
        return out


def _matrices(a: Tensor, b: Tensor, *_: Any, **__: Any) -> list[Product]:
    count = math.prod(a.shape[:-2])
    return [Product(a.shape[-2], b.shape[-1], a.shape[-1], count)]


def _vector(a: Tensor, _v: Tensor, *_: Any, **__: Any) -> list[Product]:
    return [Product(a.shape[0], 1, a.shape[1])]


def _after_bias(of: Callable[..., list[Product]]) -> Callable[..., list[Product]]:
    return lambda _bias, *factors, **more: of(*factors, **more)


def _convolution(x: Tensor, weight: Tensor, _bias: Any, *settings: Any, out: Tensor) -> list[Product]:
    """Return the product of a convolution as im2col makes it: a row for each output pixel."""
    rows, columns, inner, groups = _as_matrices(x, weight, out, settings)
    return [Product(rows, columns, inner, groups)]


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, _sizes: Any, *settings: Any, out: Any
) -> list[Product]:
    del out
    rows, columns, inner, groups = _as_matrices(x, weight, grad, settings)
    of_input, of_weight, _ = settings[6]
    found = [Product(rows, inner, columns, groups)] if of_input else []
    return found + ([Product(columns, inner, rows, groups)] if of_weight else [])


def _as_matrices(x: Tensor, weight: Tensor, out: Tensor, settings: Any) -> tuple[int, int, int, int]:
    """Return rows, columns, what is summed over, and groups of the forward product."""
    transposed, groups = settings[3], settings[5]
    pixels = x if transposed else out
    rows = pixels.shape[0] * math.prod(pixels.shape[2:])
    inner = math.prod(weight.shape[1:])
    columns = weight.shape[0] // groups
    return (rows, inner, columns, groups) if transposed else (rows, columns, inner, groups)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Product]:
    heads, rows, columns = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    return [Product(rows, columns, query.shape[-1], heads), Product(rows, value.shape[-1], columns, heads)]


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Product]:
    """Return the products of the three gradients, and that of the scores, which are computed again."""
    scores, mixed = _attention(query, key, value)
    return [scores, mixed, mixed, scores, scores]


_BY_NAME: dict[str, Callable[..., list[Product]]] = {
    "mm": _matrices,
    "bmm": _matrices,
    "addmm": _after_bias(_matrices),
    "baddbmm": _after_bias(_matrices),
    "mv": _vector,
    "addmv": _after_bias(_vector),
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    **{
        f"_scaled_dot_product_{name}": _attention
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    },
    **{
        f"_scaled_dot_product_{name}_backward": _attention_backward
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    },
}
_PRODUCTS = {getattr(_aten, name): of for name, of in _BY_NAME.items() if hasattr(_aten, name)}
