"""The norm of a gradient and its clipping, for workers that hold the whole gradient or pieces of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.trainers.optim.sparse import values_of

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.core.exchange import OptimizedTensor

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
    updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None], max_norm: float, sums: SpreadSums
) -> float:
    """Clip a gradient whose pieces are spread over the workers, in place.

    All workers call this and scale by the same factor.

    Args:
        updates: tensors that this worker's optimizer updates.
        gradients: their gradients, in the same order.
        max_norm: largest 2-norm of the whole gradient.
        sums: of the same tensors.

    Returns:
        The 2-norm of the whole gradient before clipping.
    """
    found = [
        (update.name, values_of(gradient))
        for update, gradient in zip(updates, gradients, strict=True)
        if gradient is not None
    ]
    present = [gradient for _, gradient in found]
    norms = torch.stack(torch._foreach_norm(present)).double() if found else torch.zeros(0, dtype=torch.float64)
    squares = sums.present([name for name, _ in found], (norms * norms).cpu()[None])
    norm = float(torch.linalg.vector_norm(squares[0].sqrt().to(sums.dtype)))  # as `clip` does of whole gradients
    _scale(present, norm, max_norm)
    return norm


class SpreadSums:
    """Sums, for each parameter, over the workers that its pieces are spread over.

    They are in the order of the model's parameters: what is added up of them has the bits of one process.
    """

    def __init__(
        self, updates: Sequence[OptimizedTensor], holders: Collective, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """
        Args:
            updates: tensors that this worker's optimizer updates.
            holders: workers that hold the pieces. All of them make this, and call its methods in every step.
            dtypes: type of each trained parameter of the plain model, by name and in its order.
        """
        self.holders = holders
        self.piece_of = {update.name: update.piece for update in updates}
        """Piece of each parameter that this worker updates, by its name."""
        place_of = {name: place for place, name in enumerate(dtypes)}
        own = [(place_of.get(update.name, len(dtypes)), update.piece.name) for update in updates]
        every = sorted(tuple(row) for rows in objects.gather_json(holders, own) for row in rows)
        self._index = {name: index for index, name in enumerate(dict.fromkeys(name for _, name in every))}
        self.dtype = reduce(torch.promote_types, [dtype.to_real() for dtype in dtypes.values()])
        """Type of the norms of one process."""

    def of(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the sums of what each worker has of these parameters: see `NormReducer`."""
        sums, places = self._summed(names, values, self._counted(names))
        return sums[:, places].contiguous()

    def present(self, names: Sequence[str], values: Tensor, counted: Sequence[bool] | None = None) -> Tensor:
        """Return the sums, `[any, number of parameters]`, for all parameters of which a worker has a value.

        Args:
            names: names of the parameters of which this worker has values.
            values: they, `[any, number of names]`.
            counted: which of them count; None: those of pieces that do.
        """
        there = torch.cat([values, values.new_ones(1, len(names))])
        sums, _ = self._summed(names, there, self._counted(names) if counted is None else counted)
        return sums[:-1, sums[-1] > 0]

    def totals(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the sums over all parameters: see `Optimizer.total_reducer`."""
        return self.present(names, values).sum(dim=1)

    def _counted(self, names: Sequence[str]) -> list[bool]:
        return [self.piece_of[name].is_counted for name in names]

    def _summed(self, names: Sequence[str], values: Tensor, counted: Sequence[bool]) -> tuple[Tensor, list[int]]:
        sums = values.new_zeros((len(values), len(self._index)))
        places = [self._index[self.piece_of[name].name] for name in names]
        columns = [column for column, is_counted in enumerate(counted) if is_counted]
        sums[:, [places[column] for column in columns]] = values[:, columns]
        self.holders.all_reduce(sums)
        return sums, places


def _scale(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + _LEAST))
