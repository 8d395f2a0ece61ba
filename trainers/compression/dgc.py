"""Deep gradient compression: the largest values of a momentum that each worker accumulates.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training" (2018): momentum
correction (equation 4), local gradient clipping (section 3.2), momentum factor masking (equation 5 and below), warm-up
of the sparsity (section 3.3, table 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.topk import largest_of_each, num_sent

_WARM_UP_RATIO = 0.25
_WARM_UP_STAGES = 4


class Dgc(SparseCompressor):
    """Sends the largest values of v, where u = momentum * u + gradient and v = v + u; sent values are cleared in both.

    The received values are a sum of momenta, so the optimizer must not have a momentum of its own.

    Args:
        ratio: fraction of each tensor's values to send, after the warm-up.
        momentum: decay of u.
        clip: largest 2-norm of a worker's gradient over all tensors, times the square root of the number of workers.
        warmup_steps: steps over which the fraction falls from a quarter to `ratio`, in four stages of equal length and
        by equal factors. The paper's stages are 25, 6.25, 1.56 and 0.4 %, an epoch each, before 0.1 %.
        error_feedback: True to keep unsent values; False: v is u, and only momentum is kept.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        warmup_steps: int = 0,
        error_feedback: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(error_feedback=error_feedback, **common)
        self._ratio, self._momentum, self._warmup_steps = ratio, momentum, warmup_steps
        self._max_norm: float | None = None if clip is None else clip / math.sqrt(self._num_workers)
        self._num_clipped = 0
        """Number of gradients that were longer than the largest norm."""
        self._velocity = torch.empty(0)
        self._velocities: list[Tensor] = []

    def ratio(self, step: int) -> float:
        """Return the fraction of values to send in this step; the first step is 1."""
        if step > self._warmup_steps or self._ratio >= _WARM_UP_RATIO:
            return self._ratio
        done = _WARM_UP_STAGES * (step - 1) // self._warmup_steps / _WARM_UP_STAGES
        return float(_WARM_UP_RATIO ** (1.0 - done) * self._ratio**done)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "velocity": self._velocity}

    def run_report(self) -> dict[str, Any]:
        """Return what every sparse compressor reports, and how many gradients were `clipped`."""
        said = super().run_report()
        return {**said, "clipped": self._num_clipped} if said else {}

    def _start(self) -> None:
        self._velocity = torch.zeros_like(self._flat)
        self._velocities = self._split(self._velocity)

    def _take(self, tensors: Sequence[Tensor]) -> None:
        self._check(tensors)
        if not tensors:
            return
        ordered = self._ordered(tensors)
        self._velocity.mul_(self._momentum)
        torch._foreach_add_(self._velocities, ordered, alpha=self._clip_factor(ordered))
        if self._error_feedback:
            self._flat += self._velocity
        else:
            self._flat.copy_(self._velocity)

    def _clip_factor(self, tensors: list[Tensor]) -> float:
        """Return the factor that clips the gradient to the largest allowed norm."""
        if self._max_norm is None:
            return 1.0
        norm = float(torch.stack(list(torch._foreach_norm(tensors))).norm())
        if not norm > self._max_norm:  # it may be NaN
            return 1.0
        self._num_clipped += 1
        return self._max_norm / norm

    def _select(self, flat: Tensor, step: int) -> Tensor:
        ratio = self.ratio(step)
        counts = [num_sent(size, ratio) for size in self._sizes]
        return largest_of_each(flat, self._sizes, counts, self._generator(step))

    def _sent(self, indices: Tensor, values: Tensor) -> None:
        super()._sent(indices, values)
        self._velocity.index_fill_(0, indices, 0.0)
