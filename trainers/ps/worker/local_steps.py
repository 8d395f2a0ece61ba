"""The steps of a worker at a local learning rate, where the servers have another (see `dyn_sgd`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.trainers.optim.clipping import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestray.trainers.ps.protocol.assignments import Compute
    from orchestray.trainers.ps.protocol.partition import Slice
    from orchestray.trainers.ps.server.shard import Rates


class LocalSteps:
    """Plain SGD on a share's mean loss."""

    def __init__(
        self, slices: Sequence[Slice], rates: Rates, optimizer: Mapping[str, Any], grad_clip: float | None
    ) -> None:
        """
        Args:
            slices: slices of all parameters.
            rates: learning rate of each step.
            optimizer: optimizer section of the run, of which only `weight_decay` is used.
            grad_clip: largest norm of a share's gradient.
        """
        self._names = [piece.name for piece in slices]
        self._sizes = [piece.num_elements for piece in slices]
        self._rates = rates
        self._weight_decay = float(optimizer.get("weight_decay", 0.0))
        self._grad_clip = grad_clip

    @torch.no_grad()
    def change(self, order: Compute, gradient: Tensor, values: Tensor, unused: Collection[str]) -> Tensor:
        """Return the change that a step on a share makes to the parameters, `[elements]`.

        Args:
            order: order of the share.
            gradient: gradient of the share, weighted by num_samples / batch_samples, `[elements]`; it is turned into
                the change.
            values: parameters it was computed with, `[elements]`.
            unused: parameters without a gradient, which do not change.
        """
        gradient *= order.batch_samples / order.num_samples
        if self._grad_clip is not None:
            clip([gradient], self._grad_clip)
        if self._weight_decay:
            parts = zip(
                self._names, gradient.split_with_sizes(self._sizes), values.split_with_sizes(self._sizes), strict=True
            )
            for name, part, value in parts:
                if name not in unused:
                    part.add_(value, alpha=self._weight_decay)
        gradient *= -self._rates.at(order.step)
        return gradient
