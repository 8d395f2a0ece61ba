"""The norm of a gradient and its clipping, for workers that hold the whole gradient or pieces of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.trainers.optim.sparse import values_of

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.core.exchange import OptimizedTensor
    from orchestray.trainers.optim.optimizers import NormReducer

_LEAST = 1e-6
"""Addend of a norm that is divided by."""


def clip(gradients: Sequence[Tensor | None], max_norm: float) -> float | Tensor:
    """Scale the gradients in place so that their joint 2-norm is at most `max_norm`, and return the norm before.

    The norm of gradients on a device stays there, as a tensor of one element: no number of them is read.
    """
    present = [values_of(gradient) for gradient in gradients if gradient is not None]
    if not present:  # a share without samples
        return 0.0
    norms = torch.stack(torch._foreach_norm(present))
    total = torch.linalg.vector_norm(norms)
    if total.device.type != "cpu":
        whole: Tensor = total.double()
        torch._foreach_mul_(present, torch.where(whole > max_norm, max_norm / (whole + _LEAST), 1.0))
        return whole
    norm = float(total)
    _scale(present, norm, max_norm)
    return norm


def clip_pieces(
    updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None], max_norm: float, world: Collective
) -> float:
    """Clip a gradient whose pieces are spread over the workers, in place.

    All workers call this and scale by the same factor.

    Args:
        updates: tensors that this worker's optimizer updates.
        gradients: their gradients, in the same order.
        max_norm: largest 2-norm of the whole gradient.
        world: all workers.

    Returns:
        The 2-norm of the whole gradient before clipping.
    """
    present = [values_of(gradient) for gradient in gradients if gradient is not None]
    counted = [
        values_of(gradient)
        for update, gradient in zip(updates, gradients, strict=True)
        if gradient is not None and update.piece.is_counted and gradient.numel()
    ]
    norms = torch.stack(torch._foreach_norm(counted)).double() if counted else torch.zeros(1, dtype=torch.float64)
    squares = (norms * norms).sum().cpu().reshape(1)
    world.all_reduce(squares)
    norm = math.sqrt(float(squares))
    _scale(present, norm, max_norm)
    return norm


def whole_norms(updates: Sequence[OptimizedTensor], world: Collective) -> NormReducer:
    """Return an `Optimizer.norm_reducer` for parameters whose pieces are spread over the workers.

    All workers call this function, and its result in every step.
    """
    own = [update.piece.name for update in updates]
    every = sorted({name for names in objects.gather_json(world, own) for name in names})
    index = {name: position for position, name in enumerate(every)}
    piece_of = {update.name: update.piece for update in updates}

    def reduce(names: Sequence[str], squares: Tensor) -> Tensor:
        sums = squares.new_zeros((squares.shape[0], len(every)))
        places = [index[piece_of[name].name] for name in names]
        for column, (name, place) in enumerate(zip(names, places, strict=True)):
            if piece_of[name].is_counted:
                sums[:, place] = squares[:, column]
        world.all_reduce(sums)
        return sums[:, places].contiguous()

    return reduce


def whole_totals(updates: Sequence[OptimizedTensor], world: Collective) -> NormReducer:
    """Return an `Optimizer.total_reducer` for parameters that are spread over the workers, whole or in pieces.

    All workers call the result in every step.
    """
    is_counted = {update.name: update.piece.is_counted for update in updates}

    def reduce(names: Sequence[str], squares: Tensor) -> Tensor:
        counted = torch.tensor([is_counted[name] for name in names], dtype=squares.dtype, device=squares.device)
        totals = squares @ counted
        world.all_reduce(totals)
        return totals

    return reduce


def _scale(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + _LEAST))
