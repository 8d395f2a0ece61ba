"""The batches of a shard: the shares that it has applied, and the sum of those of a batch that is not complete.

Shares are summed in the order of their samples, not in that of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.aggregation.base import Aggregation, too_few
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.json_state import Numbers
from orchestray.trainers.ps.protocol.requests import Part


@dataclass
class Push:
    """The gradient of one share, or of several as one."""

    shares: frozenset[int]
    """Shares whose gradients it sums: one for a worker, several for a leaf server."""
    gradient: Tensor
    unused: frozenset[str]
    buffers: BufferPush | None
    weight: float
    """Fraction of the batch that the samples of its shares make up."""


@dataclass
class _Batch:
    """The shares of one batch: the sum of the first shares, and the pushes that arrived before their turn.

    Pushes are summed in the order of the first share of each, whatever the order in which they arrive.
    """

    total: Push | None = None
    early: dict[int, Push] = field(default_factory=dict)
    """Pushes by the first of their shares."""

    def add(self, push: Push, reuse: Callable[[Tensor], None], *, sums: bool = True) -> bool:
        """Add a push; return True if its memory is kept. `reuse` gets the memory of earlier ones that is not."""
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
            if turn is push:
                kept = False
            else:
                reuse(turn.gradient)
        return kept

    def _turn(self) -> int:
        """Return the first share that is not in the sum."""
        there = frozenset[int]() if self.total is None else self.total.shares
        return next(share for share in range(len(there) + 1) if share not in there)


def _combined(batch: _Batch, aggregation: Aggregation, step: int) -> _Batch:
    """Combine the shares of a complete batch into one.

    Each is divided by its weight first, so that means over samples are compared with each other.

    Raises:
        TrainingError: too few workers had samples of it.
    """
    pushes = [batch.early[share] for share in sorted(batch.early)]
    if len(pushes) < aggregation.min_workers:
        raise TrainingError(too_few(aggregation, str(len(pushes)), step))
    rows = torch.stack([push.gradient / push.weight for push in pushes])
    weights = torch.tensor([push.weight for push in pushes], dtype=rows.dtype)
    total, *others = pushes
    total.gradient = aggregation(rows, weights)
    for other in others:
        total.unused &= other.unused
        if other.buffers is not None and total.buffers is not None:
            total.buffers = total.buffers + other.buffers
    return _Batch(total=total)


def _ignore(_memory: Tensor) -> None:
    return


class Batches:
    """The batches of a shard whose updates are still to come.

    Attributes:
        reuse: called with the memory of a gradient that was kept, once it is free.
    """

    def __init__(self, aggregation: Aggregation | None) -> None:
        """
        Args:
            aggregation: combines the gradients of a batch's shares; None: they are summed.
        """
        self.reuse: Callable[[Tensor], None] = _ignore
        self._aggregation = aggregation
        self._batches: dict[int, _Batch] = {}
        """Batches by step."""

    def add(self, step: int, push: Push) -> bool:
        """Add shares of a step's batch; return True if the memory of their gradient is kept."""
        return self._batches.setdefault(step, _Batch()).add(push, self.reuse, sums=self._aggregation is None)

    def take(self, step: int) -> Push:
        """Remove a complete batch and return it as one push.

        Raises:
            TrainingError: a share of the batch is missing.
        """
        batch = self._batches.pop(step)
        if self._aggregation is not None:
            batch = _combined(batch, self._aggregation, step)
        if batch.total is None or batch.early:
            raise TrainingError(f"Batch {step} is complete, and some of its shares are not there.")
        return batch.total

    def state(self) -> tuple[list[list[Any]], dict[str, Tensor]]:
        """Return the whole state: JSON values, and tensors that are the batches' own memory."""
        pending, tensors = [], dict[str, Tensor]()
        for step, batch in sorted(self._batches.items()):
            for push in [*([batch.total] if batch.total is not None else []), *batch.early.values()]:
                key = f"batch/{step}/{min(push.shares)}"
                tensors[key] = push.gradient
                if push.buffers is not None:
                    tensors |= {f"{key}/floats": push.buffers.floats, f"{key}/integers": push.buffers.integers}
                is_early = push is not batch.total
                properties = [is_early, sorted(push.unused), push.buffers is not None, push.weight]
                pending.append([step, sorted(push.shares), *properties])
        return pending, tensors

    def load_state(self, pending: Sequence[Sequence[Any]], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a copy of what `state` returned."""
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


@dataclass
class SeenShares:
    """A set of shares.

    A complete batch is remembered as a whole, and all batches up to the first incomplete one as one number.
    """

    complete_to: int = 0
    """Step up to which all steps are complete."""
    _complete: Numbers = field(default_factory=set)
    _shares: dict[int, Numbers] = field(default_factory=dict)
    _samples: dict[int, int] = field(default_factory=dict)

    def __contains__(self, part: Part) -> bool:
        return self.is_complete(part.step) or part.share in self._shares.get(part.step, ())

    def add(self, part: Part) -> None:
        self._shares.setdefault(part.step, set()).add(part.share)
        self._samples[part.step] = self._samples.get(part.step, 0) + part.num_samples
        if self._samples[part.step] >= part.batch_samples:
            del self._shares[part.step], self._samples[part.step]
            self._complete.add(part.step)
            while self.complete_to + 1 in self._complete:
                self.complete_to += 1
                self._complete.remove(self.complete_to)

    def is_complete(self, step: int) -> bool:
        return step <= self.complete_to or step in self._complete

    @property
    def num_remembered(self) -> int:
        """Number of entries held in memory."""
        return len(self._complete) + sum(len(shares) for shares in self._shares.values())
