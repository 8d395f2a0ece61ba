"""What a leaf server keeps of the parameters, and of what its workers pushed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.shard import Applied, Origin, Shard
from orchestray.trainers.central.significance import Residue
from orchestray.trainers.central.upstream import Collected, Upstream


class Copy(Protocol):
    """One way of keeping them."""

    @property
    def version(self) -> int:
        """Of the parameters, as workers are told."""

    def lend(self) -> list[Tensor]:
        """The parameters, and the model's buffers where the lead keeps any: they stay as they are until `give_back`."""

    def give_back(self, lent: Sequence[Tensor]) -> None:
        """End a `lend`."""

    def fetch(self, min_version: int) -> None:
        """Take from the shards what workers may have to compute with."""


class BatchCopy:
    """Where updates are batches: the parameters of the last one that was fetched, and shares that wait for the others
    of their batch.
    """

    def __init__(self, upstream: Upstream, *, always_newest: bool = False) -> None:
        """
        Args:
            upstream: to the shards.
            always_newest: fetch also where what is here would do: a stale run is the better, the less stale it is.
        """
        self._always_newest = always_newest
        self.waiting: dict[int, list[Collected]] = {}
        """By step."""
        self._upstream = upstream

    @property
    def version(self) -> int:
        return min(self._upstream.versions)

    def lend(self) -> list[Tensor]:
        return [self._upstream.values, *self._upstream.buffer_values]

    def give_back(self, lent: Sequence[Tensor]) -> None:
        pass

    def fetch(self, min_version: int) -> None:
        if self.version < min_version:
            self._upstream.pull(min_version)

    def prepare(self, min_version: int) -> None:
        """As `fetch`, for workers that are about to be given orders."""
        if self._always_newest:
            self._upstream.pull(min_version)
        else:
            self.fetch(min_version)

    def add(self, collected: Collected) -> None:
        """Keep a share until it is taken out."""
        self.waiting.setdefault(collected.parts[0].step, []).append(collected)

    def take(self, step: int) -> list[Collected]:
        """Those of a batch, in the order of its shares."""
        return sorted(self.waiting.pop(step), key=lambda one: one.parts[0].share)

    def drop(self, worker: int) -> list[Collected]:
        """Forget what a worker pushed and nobody else has been told of: it will be computed again."""
        dropped = [one for found in self.waiting.values() for one in found if one.worker == worker]
        kept = {step: [one for one in found if one.worker != worker] for step, found in self.waiting.items()}
        self.waiting = {step: found for step, found in kept.items() if found}
        return dropped


class LocalCopy:
    """Where each push is an update: the leaf moves parameters of its own at once, and passes on how it has moved them.

    They are what the shards have told, and what has not been passed on, at all times.
    """

    def __init__(self, upstream: Upstream, shard: Shard, significance: float) -> None:
        """
        Args:
            upstream: to the shards.
            shard: all parameters, with an optimizer of its own; asynchronous.
            significance: see `significance`; 0: everything is passed on with the next message.
        """
        self.shard = shard
        self.residue = Residue(shard.values, significance)
        self._upstream = upstream
        self._lock = threading.RLock()
        self._buffers: BufferPush | None = None
        self._seen = list(upstream.versions)
        self._become()

    @property
    def version(self) -> int:
        return self.shard.version

    def lend(self) -> list[Tensor]:
        with self._lock:
            buffers = self.shard.buffers
            return [self.shard.lend(), *([] if buffers is None else [buffers.floats.clone(), buffers.integers.clone()])]

    def give_back(self, lent: Sequence[Tensor]) -> None:
        with self._lock:
            self.shard.give_back(lent[0])

    @torch.no_grad()
    def apply(self, collected: Collected) -> Applied:
        """Move the parameters by a push, if it was not there before."""
        origin = Origin(collected.worker, collected.parts, collected.read_version)
        with self._lock:
            before = self.shard.lend()
            try:
                done = self.shard.push(origin, collected.gradient, sorted(collected.unused), collected.buffers)
                if done.taken:
                    self.residue.add(self.shard.values - before)
            finally:
                self.shard.give_back(before)
        if done.taken and collected.buffers is not None:
            self._buffers = collected.buffers if self._buffers is None else self._buffers + collected.buffers
        return done

    def send(self, acknowledged: Sequence[Sequence[Any]] = (), *, everything: bool = False) -> list[bool]:
        """Pass on what is significant, or everything, and take in what the other leaves have passed on.

        Args:
            acknowledged: see `Upstream.change`, also for what is returned.
            everything: see above.
        """
        places, change = self.residue.take(self.shard.values, everything=everything)
        buffers, self._buffers = self._buffers, None
        counts = self._upstream.change(places, change, buffers, owes=self.residue.owes, acknowledged=acknowledged)
        self._become(own_updates=1)
        return counts

    def fetch(self, min_version: int = 0) -> None:
        self._upstream.refresh()
        self._become()

    @torch.no_grad()
    def _become(self, own_updates: int = 0) -> None:
        upstream, shard = self._upstream, self.shard
        with self._lock:
            shard.become(upstream.values + self.residue.pending)
            shard.version += max(0, upstream.versions[0] - self._seen[0] - own_updates)
            if shard.buffers is not None and upstream.buffer_values:
                shard.buffers.floats.copy_(upstream.buffer_values[0])
                shard.buffers.integers.copy_(upstream.buffer_values[1])
        self._seen = list(upstream.versions)
