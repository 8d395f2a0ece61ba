"""A model's buffers (running statistics of batch normalisation) under a parameter server.

As `batch_norm.sync_buffers` brings those of lock-step replicas together: floating-point ones become the average
weighted by samples, others the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BufferPush:
    """What shares did to the buffers."""

    floats: Tensor
    """By how much they moved the floating-point ones, times their part of the batch; flat, float64."""
    integers: Tensor
    """What the others are now; flat, int64."""

    def __add__(self, other: BufferPush) -> BufferPush:
        """What both have done."""
        return BufferPush(self.floats + other.floats, torch.maximum(self.integers, other.integers))


class Buffers:
    """The buffers as a server keeps them: floating-point ones in one flat float64 tensor, others in an int64 one."""

    def __init__(self, floats: Tensor, integers: Tensor) -> None:
        self.floats = floats
        self.integers = integers

    @classmethod
    def of(cls, model: nn.Module) -> Buffers:
        """A copy of the model's."""
        floats, others = _kinds(model)
        return cls(_flat(floats, torch.float64), _flat(others, torch.int64))

    def add(self, push: BufferPush) -> None:
        """Take what some shares did."""
        self.floats += push.floats
        torch.maximum(self.integers, push.integers, out=self.integers)

    def copy(self) -> Buffers:
        return Buffers(self.floats.clone(), self.integers.clone())

    def write_to(self, model: nn.Module) -> None:
        """Make the model's buffers these."""
        for flat, kind in zip((self.floats, self.integers), _kinds(model), strict=True):
            for part, buffer in zip(flat.split_with_sizes([b.numel() for b in kind]), kind, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def change_of(self, model: nn.Module, weight: float) -> BufferPush:
        """What the model's forward passes have done since its buffers were these.

        Args:
            model: the worker's.
            weight: num_samples / batch_samples of the share.
        """
        now = Buffers.of(model)
        return BufferPush((now.floats - self.floats) * weight, now.integers)


def _kinds(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    buffers = [buffer for buffer in model.buffers() if not buffer.is_complex()]
    return [b for b in buffers if b.is_floating_point()], [b for b in buffers if not b.is_floating_point()]


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
