"""A leaf server's copies of the parameters, and of its workers' pushes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.messages import flat_state
from orchestray.trainers.ps.protocol.requests import Origin, ReportOf
from orchestray.trainers.ps.protocol.state import SLOTS, whole_slots
from orchestray.trainers.ps.server.shard import Applied, Shard
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Collected, Upstream
from orchestray.trainers.ps.variants.hierarchy.significance_filter import Residual


class Copy(Protocol):
    """A way of keeping a copy of the parameters."""

    @property
    def version(self) -> int:
        """Version of the parameters that workers see."""

    def lend(self) -> list[Tensor]:
        """Return the parameters, and the model's buffers if the lead has any; they stay unchanged until `give_back`."""

    def give_back(self, lent: Sequence[Tensor]) -> None:
        """End a `lend`."""

    def fetch(self, min_version: int) -> None:
        """Take from the shards what workers may have to compute with."""


class BatchCopy:
    """A copy for updates that are batches: the parameters fetched last, and shares that wait for the rest of their
    batch.
    """

    def __init__(self, upstream: Upstream, *, always_newest: bool = False) -> None:
        """
        Args:
            upstream: connection to the shards.
            always_newest: True to fetch even if the present parameters would do: less staleness is better for a stale
                run.
        """
        self._always_newest = always_newest
        self.waiting: dict[int, list[Collected]] = {}
        """Waiting shares by their `round_of`."""
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

    def round_of(self, step: int) -> int:
        """Return the number of the push that a share of batch `step` becomes a part of."""
        return step

    def prepare(self, min_version: int) -> None:
        """Fetch for workers that are about to be given orders."""
        if self._always_newest:
            self._upstream.pull(min_version)
        else:
            self.fetch(min_version)

    def add(self, collected: Collected) -> None:
        """Keep a share until `take` or `drop`."""
        self.waiting.setdefault(self.round_of(collected.parts[0].step), []).append(collected)

    def take(self, number: int) -> list[Collected]:
        """Remove the shares of one push and return them in the order of batches, and in their order in a batch."""
        return sorted(self.waiting.pop(number), key=lambda one: (one.parts[0].step, one.parts[0].share))

    def drop(self, worker: int) -> list[Collected]:
        """Remove and return the shares of a worker that have not been passed on; they will be computed again."""
        dropped = [one for found in self.waiting.values() for one in found if one.worker == worker]
        kept = {step: [one for one in found if one.worker != worker] for step, found in self.waiting.items()}
        self.waiting = {step: found for step, found in kept.items() if found}
        return dropped


class GroupCopy(BatchCopy):
    """A copy for a compute group, whose workers take a share each with the same parameters: one update of them all.

    The shares of one round may be of two batches. Groups do not wait for each other, so the parameters of a round are
    as many updates old as the other groups have made meanwhile.
    """

    def __init__(self, upstream: Upstream) -> None:
        """
        Args:
            upstream: connection to the shards.
        """
        super().__init__(upstream, always_newest=True)

    def round_of(self, step: int) -> int:
        return 0


class LocalCopy:
    """A copy for updates of single pushes: the leaf moves its own parameters at once, and passes on the change.

    Its parameters are always those of the shards plus the change that has not been passed on.
    """

    def __init__(self, upstream: Upstream, shard: Shard, significance: float, *, falls: bool = False) -> None:
        """
        Args:
            upstream: connection to the shards.
            shard: all parameters, with an optimizer of its own; asynchronous.
            significance: see `significance_filter`; 0: everything is passed on with the next message.
            falls: True if it falls with the root of the number of updates.
        """
        self.shard = shard
        self.residual = Residual(shard.values, significance, falls=falls)
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
        """Move the parameters by a push, unless it has been applied already."""
        origin = Origin(collected.worker, collected.parts, collected.read_version)
        with self._lock:
            before = self.shard.lend()
            try:
                done = self.shard.push(origin, collected.gradient, sorted(collected.unused), collected.buffers)
                if done.taken:
                    self.residual.add(self.shard.values - before)
            finally:
                self.shard.give_back(before)
        if done.taken and collected.buffers is not None:
            self._buffers = collected.buffers if self._buffers is None else self._buffers + collected.buffers
        return done

    def send(self, acknowledged: Sequence[ReportOf] = (), *, everything: bool = False) -> Sequence[bool]:
        """Pass on what is significant, or everything, and take what the other leaves have passed on.

        Args:
            acknowledged: see `Upstream.change`.
            everything: True to pass on insignificant changes too.

        Returns:
            For each of the acknowledged shares True if it counts.
        """
        places, change = self.residual.take(self.shard.values, everything=everything, num_updates=self.shard.version)
        buffers, self._buffers = self._buffers, None
        counts = self._upstream.change(places, change, buffers, owes=self.residual.owes, acknowledged=acknowledged)
        self._become(own_updates=1)
        return counts

    def fetch(self, min_version: int = 0) -> None:
        self._upstream.refresh()
        self._become()

    @torch.no_grad()
    def _become(self, own_updates: int = 0) -> None:
        upstream, shard = self._upstream, self.shard
        with self._lock:
            shard.become(upstream.values + self.residual.pending)
            shard.version += max(0, upstream.versions[0] - self._seen[0] - own_updates)
            if shard.buffers is not None and upstream.buffer_values:
                shard.buffers.floats.copy_(upstream.buffer_values[0])
                shard.buffers.integers.copy_(upstream.buffer_values[1])
        self._seen = list(upstream.versions)


def snapshot_of(
    upstream: Upstream, copy: BatchCopy | LocalCopy, step: int | None
) -> tuple[tuple[str, ...], list[Tensor], str | None]:
    """Return the state of all shards in the form of a single server's snapshot.

    If leaf servers have optimizers, the optimizer state is this leaf's.

    Args:
        upstream: connection to the shards.
        copy: the leaf's copy of the parameters.
        step: see `ShardServer.snapshot`.

    Returns:
        Names, tensors, and the lead's state of the run as JSON.
    """
    snapshots, run_state = upstream.snapshots(step)
    whole = {"values": torch.cat([snapshot["values"] for snapshot in snapshots])}
    if isinstance(copy, LocalCopy):
        whole |= {f"{SLOTS}{name}": tensor for name, tensor in copy.shard.optimizer_slots().items()}
    else:
        for name, tensor in whole_slots(upstream.partition, snapshots).items():
            owner, _, slot = name.rpartition(".")
            whole[f"{SLOTS}{owner}:0.{slot}"] = tensor
    whole |= {name: tensor for name, tensor in snapshots[0].items() if name.startswith("buffers/")}
    names, tensors = flat_state(whole)
    return names, tensors, run_state
