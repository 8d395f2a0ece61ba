"""The gradients of several pushes, from which an asynchronous server makes one update.

Gupta, Zhang and Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning" (2016, Rudra), n-softsync: the
server of w workers makes an update once w / n gradients have arrived, from any workers. A gradient is then about n
updates old when it counts, however many workers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_KEY = "softsync/sum"


class Softsync:
    """A sum of pushed gradients that is not an update yet."""

    def __init__(self, num_pushes: int, like: Tensor) -> None:
        """
        Args:
            num_pushes: number of pushes of an update, w / n.
            like: tensor with the shape, dtype and device of a gradient.
        """
        self._num_pushes = num_pushes
        self._sum = torch.zeros_like(like)
        self._parts: list[tuple[int, float, list[str]]] = []
        """Step, weight and unused parameters of each push in the sum."""
        self._taken = [0, 0]
        """Updates and pushes that have been taken."""
        self._num_scaled = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `updates`, of `pushes` they were made of, and of pushes that were `scaled` down.

        It is empty before the first update.
        """
        updates, pushes = self._taken
        return {"updates": updates, "pushes": pushes, "scaled": self._num_scaled} if updates else {}

    @torch.no_grad()
    def add(self, gradient: Tensor, scale: float, step: int, weight: float, unused: Sequence[str]) -> bool:
        """Add a push; return True if an update is due.

        Args:
            gradient: gradient, `[elements]`; neither kept nor altered.
            scale: factor of the gradient.
            step: newest batch of its shares.
            weight: its part of a batch.
            unused: parameters that it has no gradient for.
        """
        self._sum.add_(gradient, alpha=scale)
        self._num_scaled += scale < 1
        self._parts.append((step, weight, sorted(unused)))
        return len(self._parts) == self._num_pushes

    def take(self) -> tuple[Tensor, frozenset[str], int, float]:
        """Return the sum, `[elements]`, the parameters that no push had, the newest batch and the weight; begin again.

        The sum may be changed.
        """
        steps, weights, unused = zip(*self._parts, strict=True)
        self._taken[0] += 1
        self._taken[1] += len(self._parts)
        total, self._sum, self._parts = self._sum, torch.zeros_like(self._sum), []
        return total, frozenset.intersection(*map(frozenset, unused)), max(steps), sum(weights)

    def state(self) -> tuple[list[list[Any]], dict[str, Tensor]]:
        """Return all that a copy needs: JSON values, and a tensor that is this object's own memory."""
        return [list(part) for part in self._parts], {_KEY: self._sum}

    def load_state(self, parts: Sequence[Sequence[Any]], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a copy of what `state` returned."""
        self._parts = [(int(step), float(weight), list(unused)) for step, weight, unused in parts]
        self._sum.copy_(tensors[_KEY])
