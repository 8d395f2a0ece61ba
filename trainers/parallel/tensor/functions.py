"""Differentiable communication within a tensor group.

Every worker of the group holds a "whole" tensor, with the same bits. Each holds its part, along a dimension, of a
"split" tensor. A "term" has the shape of the whole, which is the sum of the workers' terms. The operations forward and
backward (Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4.2):

    function      forward                            backward                           bytes sent, n those of the whole
    enter         whole -> whole                     terms -> whole: all-reduce         back 2(T-1)/T n
    add_up        terms -> whole: all-reduce         whole -> whole                     forth 2(T-1)/T n
    gather        split -> whole: all-gather         whole -> split: a slice            forth (T-1)/T n
    scatter       whole -> split: a slice            split -> whole: all-gather         back (T-1)/T n
    gather_terms  split -> whole: all-gather         terms -> split: reduce-scatter     (T-1)/T n each way
    add_up_parts  terms -> split: reduce-scatter     split -> whole: all-gather         (T-1)/T n each way

Parts of unequal size are sent padded to the largest. A backward pass uses the group of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orchestray.platform.comm.collective import Collective

GroupRef = Callable[[], Collective]
"""Function that returns a worker's current tensor group."""


def enter(x: Tensor, group: GroupRef) -> Tensor:
    """Pass a whole tensor into a computation that is split, in which each worker finds a term of its gradient."""
    return cast(Tensor, cast(Any, _Enter.apply)(x, group()))


def add_up(term: Tensor, group: GroupRef) -> Tensor:
    """Return the sum of the workers' terms. `term` is overwritten: only the caller
    may use it, and autograd must not save it.
    """
    return cast(Tensor, cast(Any, _AddUp.apply)(term if term.is_contiguous() else term.contiguous(), group()))


def gather(part: Tensor, group: GroupRef, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the whole from its parts, for a computation that every worker does in the same way.

    Args:
        part: this worker's part, of `sizes[rank]` along `dim`.
        group: returns the group of workers.
        dim: dimension along which the tensor is split.
        sizes: size of every worker's part along `dim`.
    """
    return cast(Tensor, cast(Any, _Gather.apply)(part, group(), dim, sizes))


def scatter(x: Tensor, group: GroupRef, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return this worker's part of a whole tensor that nothing else uses; arguments are those of `gather`."""
    return cast(Tensor, cast(Any, _Scatter.apply)(x, group(), dim, sizes))


def gather_terms(part: Tensor, group: GroupRef, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the whole from its parts, for a computation that is split; arguments are those of `gather`."""
    return cast(Tensor, cast(Any, _GatherTerms.apply)(part, group(), dim, sizes))


def add_up_parts(term: Tensor, group: GroupRef, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return this worker's part of the sum of the workers' terms; arguments are those of `gather`."""
    return cast(Tensor, cast(Any, _AddUpParts.apply)(term, group(), dim, sizes))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, term: Tensor) -> tuple[Tensor, None]:
        return _sum(term, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, group: Collective) -> Tensor:
        ctx.mark_dirty(term)
        group.all_reduce(term)
        return term

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.rank, ctx.dim, ctx.sizes = group.rank, dim, sizes
        return _join(part, group, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _slice(dy, ctx.rank, ctx.dim, ctx.sizes), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _slice(x, group.rank, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, part: Tensor) -> tuple[Tensor, None, None, None]:
        return _join(part, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _join(part, group, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, term: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_part(term, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _AddUpParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _sum_part(term, group, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, part: Tensor) -> tuple[Tensor, None, None, None]:
        return _join(part, ctx.group, ctx.dim, ctx.sizes), None, None, None


def _sum(term: Tensor, group: Collective) -> Tensor:
    whole = term.clone(memory_format=torch.contiguous_format)  # another function may use the gradient too
    group.all_reduce(whole)
    return whole


def _slice(x: Tensor, rank: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def _join(part: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
    largest = max(sizes)
    rows = group.all_gather(_padded(part, dim, largest))
    if rows.numel() == 0:
        shape = list(part.shape)
        shape[dim] = sum(sizes)
        return part.new_zeros(shape)
    return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows.unbind(0), sizes, strict=True)], dim)


def _sum_part(term: Tensor, group: Collective, dim: int, sizes: Sequence[int]) -> Tensor:
    largest = max(sizes)
    stacked = torch.stack([_padded(part, dim, largest) for part in torch.split(term, list(sizes), dim)])
    own = stacked.new_empty(stacked.shape[1:])
    group.start_reduce_scatter(own, stacked).wait()
    return own.narrow(dim, 0, sizes[group.rank]).contiguous()


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    if part.shape[dim] == size:
        return part.contiguous()
    shape = list(part.shape)
    shape[dim] = size
    padded = part.new_zeros(shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded
