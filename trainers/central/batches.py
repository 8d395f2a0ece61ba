"""Shares of batches that are not complete yet: summed in the order of their samples, whatever order they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.aggregation import Aggregation
from orchestray.trainers.central.buffers import BufferPush


@dataclass
class Push:
    """The gradient of one share, or of several as one."""

    shares: frozenset[int]
    """Whose sum it is: one of a worker's, several of a leaf server's."""
    gradient: Tensor
    unused: frozenset[str]
    buffers: BufferPush | None
    weight: float
    """Its samples' part of the batch."""


@dataclass
class _Batch:
    """Of the shares of a batch: the sum of the first ones, and those that came before their turn.

    Pushes are summed in the order of the first share of each, whatever the order they come in.
    """

    total: Push | None = None
    early: dict[int, Push] = field(default_factory=dict)
    """By the first of their shares."""

    def add(self, push: Push, *, sums: bool = True) -> bool:
        """Returns whether the push's memory is kept."""
        self.early[min(push.shares)] = push
        kept = True
        if not sums:
            return kept
        while (turn := self.early.pop(self._turn(), None)) is not None:
            if self.total is None:
                self.total = turn
                continue
            self.total.gradient += turn.gradient
            self.total.shares, self.total.unused = self.total.shares | turn.shares, self.total.unused & turn.unused
            if turn.buffers is not None and self.total.buffers is not None:
                self.total.buffers = self.total.buffers + turn.buffers
            kept = kept and turn is not push
        return kept

    def _turn(self) -> int:
        """The first share that is not in the sum."""
        there = frozenset[int]() if self.total is None else self.total.shares
        return next(share for share in range(len(there) + 1) if share not in there)


def _combined(batch: _Batch, aggregation: Aggregation) -> _Batch:
    """The shares of a complete batch as one: each taken as the mean over its samples, so that like is compared."""
    pushes = [batch.early[share] for share in sorted(batch.early)]
    rows = torch.stack([push.gradient / push.weight for push in pushes])
    weights = torch.tensor([push.weight for push in pushes], dtype=rows.dtype)
    total, *others = pushes
    total.gradient = aggregation(rows, weights)
    for other in others:
        total.unused &= other.unused
        if other.buffers is not None and total.buffers is not None:
            total.buffers = total.buffers + other.buffers
    return _Batch(total=total)


class Batches:
    """What a shard has of each batch whose update is still to come."""

    def __init__(self, aggregation: Aggregation | None) -> None:
        """
        Args:
            aggregation: combines the gradients of the shares of a batch; None: their sum.
        """
        self._aggregation = aggregation
        self._batches: dict[int, _Batch] = {}
        """By step."""

    def add(self, step: int, push: Push) -> bool:
        """Take in shares of the batch of a step; returns whether the memory of their gradient is kept."""
        return self._batches.setdefault(step, _Batch()).add(push, sums=self._aggregation is None)

    def take(self, step: int) -> Push:
        """Take out a complete batch, as one; TrainingError where a share of it is not there."""
        batch = self._batches.pop(step)
        if self._aggregation is not None:
            batch = _combined(batch, self._aggregation)
        if batch.total is None or batch.early:
            raise TrainingError(f"Batch {step} is complete, and some of its shares are not there.")
        return batch.total

    def state(self) -> tuple[list[list[Any]], dict[str, Tensor]]:
        """All of it: JSON, and tensors that are the batches' own memory."""
        pending, tensors = [], dict[str, Tensor]()
        for step, batch in sorted(self._batches.items()):
            for push in [*([batch.total] if batch.total is not None else []), *batch.early.values()]:
                key = f"batch/{step}/{min(push.shares)}"
                tensors[key] = push.gradient
                if push.buffers is not None:
                    tensors |= {f"{key}/floats": push.buffers.floats, f"{key}/integers": push.buffers.integers}
                is_early = push is not batch.total
                told = [is_early, sorted(push.unused), push.buffers is not None, push.weight]
                pending.append([step, sorted(push.shares), *told])
        return pending, tensors

    def load_state(self, pending: Sequence[Sequence[Any]], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a copy of what `state` returned."""
        self._batches = {}
        for step, shares, is_early, unused, has_buffers, weight in pending:
            key = f"batch/{step}/{min(shares)}"
            buffers = None
            if has_buffers:
                buffers = BufferPush(tensors[f"{key}/floats"].clone(), tensors[f"{key}/integers"].clone())
            push = Push(frozenset(shares), tensors[key].clone(), frozenset(unused), buffers, weight)
            batch = self._batches.setdefault(step, _Batch())
            if is_early:
                batch.early[min(shares)] = push
            else:
                batch.total = push
