"""Sparse gradients, such as those of `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from torch import Tensor, strided


def is_sparse(gradient: Tensor | None) -> bool:
    """Return True for a gradient that lacks rows of zeros."""
    return gradient is not None and gradient.layout is not strided


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with its rows of zeros."""
    return gradient if gradient.layout is strided else gradient.to_dense()


def rows_once(gradient: Tensor) -> Tensor:
    """Return a sparse gradient with each row once; others as they are."""
    return gradient if gradient.layout is strided else gradient.coalesce()


def values_of(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient that are not left out, in its own memory; a sparse one has each row once."""
    return gradient if gradient.layout is strided else gradient.values()
