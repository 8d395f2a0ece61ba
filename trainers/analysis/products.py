"""The products of matrices in a computation, and what they cost on units that take sizes in multiples of a number.

NVIDIA's tensor cores want sizes that 8 (half precision) or 16 (int8) divides, a TPU ones that 128 divides: elsewhere
matrices are padded with zeros, and the zeros are multiplied, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten

UNITS: Mapping[str, int] = {"fp16 tensor cores": 8, "int8 tensor cores": 16, "a TPU": 128}
"""Multiples that units for short numbers want, by their names."""


@dataclass(frozen=True)
class Product:
    """A product of matrices [m, k] and [k, n], done `count` times; a convolution is one over all patches."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def multiplications(self) -> int:
        return self.m * self.n * self.k * self.count

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.multiplications

    def padded(self, multiple: int) -> Product:
        """Return the product of matrices padded so that `multiple` divides each of their sizes."""
        m, n, k = (-(-size // multiple) * multiple for size in (self.m, self.n, self.k))
        return Product(m, n, k, self.count)


def padded_product(one: Tensor, other: Tensor, multiple: int) -> Tensor:
    """Return the product of [rows, inner] and [inner, columns], computed with sizes that `multiple` divides."""
    rows, columns = len(one), other.shape[1]
    whole = _padded(one, multiple) @ _padded(other, multiple)
    return whole[:rows, :columns]


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    below, right = (-size % multiple for size in matrix.shape)
    return functional.pad(matrix, (0, right, 0, below))


def products_of(operation: Any, args: Any, out: Any) -> Sequence[Product]:
    """Return the products of matrices of one of torch's operations; of others none.

    Args:
        operation: the operation, such as `torch.ops.aten.mm`.
        args: its positional arguments.
        out: its result.
    """
    found = _PRODUCTS.get(operation)
    return () if found is None else found(*args, out=out)


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
