"""Norms of whole parameters, of which workers hold parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.platform.collective import Collective
from orchestray.trainers.exchange.base import Update
from orchestray.trainers.optimizers import NormReducer


def norm_reducer(updates: Sequence[Update], groups: Sequence[Collective]) -> NormReducer:
    """What `Optimizer.norm_reducer` asks for.

    Args:
        updates: what this worker's optimizer changes; parts whose piece is not counted add nothing.
        groups: summed over one after the other. Together they are the workers that hold the same parameters in parts
            or in copies (data and tensor axis), all of which call in every step, with the same names.
    """
    is_counted = {update.name: float(update.piece.is_counted) for update in updates}

    def reduce(names: Sequence[str], squares: Tensor) -> Tensor:
        counted = torch.tensor([is_counted[name] for name in names], dtype=squares.dtype, device=squares.device)
        sums = torch.where(counted > 0, squares, 0.0)  # not 0 x infinity
        for group in groups:
            group.all_reduce(sums)
        return sums

    return reduce
