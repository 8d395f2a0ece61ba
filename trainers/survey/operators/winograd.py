"""Convolution of small tiles with fewer products: F(m x m, r x r) (Winograd 1980; Lavin & Gray 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Transforms(NamedTuple):
    """The matrices of F(m, r), with alpha = m + r - 1: y = A [(G g) * (B d)] for a kernel g and inputs d."""

    a: Tensor
    """[m, alpha]."""
    g: Tensor
    """[alpha, r]."""
    b: Tensor
    """[alpha, alpha]."""


def winograd(x: Tensor, weight: Tensor, outputs: int = 2) -> Tensor:
    """Return a convolution with stride 1 and square kernels.

    A tile of m x m outputs takes (m + r - 1)^2 products for each pair of channels, and m^2 r^2 by the definition.

    Args:
        x: [samples, in channels, height, width], with padding.
        weight: [out channels, in channels, r, r].
        outputs: side m of a tile's outputs.
    """
    size = weight.shape[-1]
    a, g, b = (each.to(x) for each in transforms(outputs, size))
    height, width = x.shape[2] - size + 1, x.shape[3] - size + 1
    x = functional.pad(x, (0, -width % outputs, 0, -height % outputs))
    tile = outputs + size - 1
    tiles = x.unfold(2, tile, outputs).unfold(3, tile, outputs)  # samples, channels, tiles (2), tile (2)
    kernels = (g @ weight @ g.T).permute(2, 3, 0, 1)  # tile (2), out channels, in channels
    inputs = (b @ tiles @ b.T).permute(4, 5, 1, 0, 2, 3)  # tile (2), in channels, samples, tiles (2)
    products = (kernels @ inputs.flatten(3)).reshape(*kernels.shape[:3], *inputs.shape[3:])
    parts = a @ products.permute(3, 2, 4, 5, 0, 1) @ a.T  # samples, out channels, tiles (2), outputs (2)
    out = parts.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)
    return out[:, :, :height, :width]


@cache
def transforms(outputs: int, size: int) -> Transforms:
    """Return the matrices of F(m, r) by the construction of Cook and Toom, in double precision.

    Polynomials are evaluated at m + r - 2 points, 0, 1, -1, 2, -2, 1/2, ..., and at infinity. The more points, the
    larger the matrices' elements and the error.

    Args:
        outputs: number m of outputs.
        size: number r of a kernel's elements.
    """
    points = list(islice(_points(), outputs + size - 2))
    finite = len(points)
    a = [[point**row for point in points] + [Fraction(int(row == outputs - 1))] for row in range(outputs)]
    g = [[point**column / _others(points, point) for column in range(size)] for point in points]
    g.append([Fraction(int(column == size - 1)) for column in range(size)])
    b = [[*_polynomial([other for other in points if other != point]), Fraction(0)] for point in points]
    b.append(_polynomial(points))
    assert all(len(row) == finite + 1 for row in (*a, *b))
    return Transforms(*map(_tensor, (a, g, b)))


def _tensor(rows: list[list[Fraction]]) -> Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)


def _points() -> Iterator[Fraction]:
    yield Fraction(0)
    for number in range(1, 64):
        for point in (Fraction(number), Fraction(1, number)) if number > 1 else (Fraction(1),):
            yield point
            yield -point


def _others(points: list[Fraction], point: Fraction) -> Fraction:
    """Return the product of the differences to the other points."""
    product = Fraction(1)
    for other in points:
        if other != point:
            product *= point - other
    return product


def _polynomial(roots: list[Fraction]) -> list[Fraction]:
    """Return the coefficients of the product of (x - root), the lowest first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [above - root * below for above, below in zip(shifted, [*found, Fraction(0)], strict=True)]
    return found
