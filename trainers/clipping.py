"""The norm of a gradient, and its clipping, where workers hold all of it or pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.trainers.exchange.base import Update


def clip(gradients: Sequence[Tensor | None], max_norm: float) -> float:
    """Scale the gradients so that their joint 2-norm is at most `max_norm`; returns the norm before."""
    present = [gradient for gradient in gradients if gradient is not None]
    norms = torch.stack(torch._foreach_norm(present))
    norm = float(torch.linalg.vector_norm(norms))
    _scale(present, norm, max_norm)
    return norm


def clip_pieces(
    updates: Sequence[Update], gradients: Sequence[Tensor | None], max_norm: float, world: Collective
) -> float:
    """As `clip`, of a gradient whose pieces are spread over the workers; all of them call, and scale alike."""
    present = [gradient for gradient in gradients if gradient is not None]
    counted = [
        gradient
        for update, gradient in zip(updates, gradients, strict=True)
        if gradient is not None and update.piece.is_counted and gradient.numel()
    ]
    norms = torch.stack(torch._foreach_norm(counted)).double() if counted else torch.zeros(1, dtype=torch.float64)
    squares = (norms * norms).sum().cpu().reshape(1)
    world.all_reduce(squares)
    norm = math.sqrt(float(squares))
    _scale(present, norm, max_norm)
    return norm


def _scale(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
