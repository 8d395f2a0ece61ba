"""Data parallelism with the optimizer's state, and the gradients, sharded over the replicas: ZeRO stages 1 and 2.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), sections 5.1
and 5.2, and 7.1 for the bytes. Gradients are reduce-scattered in buckets while the backward pass runs. Each replica
updates its own rows, and the updated parameters are all-gathered. This sends as much as an all-reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.exchange import OptimizedTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.buckets import Filling, in_groups, number
from orchestray.trainers.sync.common.exchange_base import ExchangeBase
from orchestray.trainers.sync.zero.reduce_scatter import AllGather, ReduceScatter
from orchestray.trainers.sync.zero.replicated import Replicated
from orchestray.trainers.sync.zero.row_sharding import can_be_cut
from orchestray.trainers.sync.zero.shard_bucket import ShardBucket, Spare

_MAX_IN_FLIGHT = 2
"""Most buckets reduced at once; the oldest is waited for before the next is sent,
so that its memory can be used again.
"""
_MIN_BUCKETS = 16
"""Fewest buckets; they are made smaller than configured to reach it, so that little memory is in flight."""
_SMALLEST_LIMIT_BYTES = 1 << 20


class Sharded(ExchangeBase):
    """The exchange of ZeRO-1 (`shard="optimizer"`) or ZeRO-2 (`shard="gradients"`).

    Every replica holds all parameters. A parameter's rows (dimension 0 of what the worker holds) are spread over the
    replicas; each holds the optimizer's state of its rows and updates them in place, in the parameter's own memory.

    With "optimizer" the buffers for whole gradients stay. With "gradients" a bucket's whole gradients are freed as soon
    as they are reduced, and only this replica's own rows are kept. Either way whole gradients are accumulated over the
    micro-batches of a step, as without sharding, and sent once.

    All N replicas together send, per step, 2 (N-1) times the bytes of the parameters (without padding over gloo), and
    one small all-reduce. It holds the extras, which parameters were used, and the gradients of scalar parameters, which
    are not sharded.

    The replicas scale their losses by num_samples / batch_samples, so the gradients are plainly summed. A parameter
    that is not used by any replica has no gradient. If a peer is lost during `after_step`, the parameters are partly
    updated: load the last checkpoint.

    Args:
        shard: what is sharded.
        bucket_mb: size of a bucket at most, in MiB; smaller for small models.
        overlap: True to send during the backward pass; False to send after it (the result is the same bit for bit).
    """

    takes_complex = True

    def __init__(
        self,
        shard: Literal["optimizer", "gradients"] = "gradients",
        *,
        bucket_mb: float = 25.0,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self._keeps_whole = shard == "optimizer"
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._overlap = overlap
        self._filling: Filling[ShardBucket] | None = None
        self._replicated: Replicated | None = None
        self._in_flight: deque[tuple[ShardBucket, ReduceScatter]] = deque()
        self._spare = Spare()
        self._used_anywhere: list[bool] = []
        self._gradient_views: list[Tensor | None] = []

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        if collective.size == 1:
            return
        sharded = [parameter for parameter in self._parameters if can_be_cut(parameter)]
        total_bytes = sum(parameter.nbytes for parameter in sharded)
        limit = min(self._bucket_bytes, max(_SMALLEST_LIMIT_BYTES, total_bytes // _MIN_BUCKETS))
        spare = None if self._keeps_whole else self._spare
        buckets = [ShardBucket(group, collective, spare) for group in in_groups(sharded, limit)]
        number(buckets, self._parameters)
        self._replicated = Replicated(self._parameters, [p for p in self._parameters if not can_be_cut(p)], collective)
        self._filling = Filling(buckets, self._reduce, overlap=self._overlap)
        self._updates, self._gradient_views = self._own_shards(pieces)

    def _own_shards(
        self, pieces: Mapping[str, TensorSlice] | None
    ) -> tuple[list[OptimizedTensor], list[Tensor | None]]:
        assert self._filling is not None
        updates = list(self._updates)
        views: list[Tensor | None] = [None] * len(updates)
        for bucket in self._filling.buckets:
            for slot, index in enumerate(bucket.flags):
                name = updates[index].name
                piece = (pieces or {}).get(name) or TensorSlice.whole(name, bucket.parameters[slot].shape)
                rows = bucket.own_rows(slot)
                updates[index] = OptimizedTensor(name, bucket.own_values(slot), piece.narrow(0, rows))
                views[index] = bucket.own_gradient(slot)
        return updates, views

    def detach(self) -> None:
        if self._filling is not None:
            self._filling.close()
        super().detach()
        self._in_flight.clear()
        self._spare.clear()
        self._gradient_views, self._used_anywhere = [], []
        self._filling = self._replicated = None

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients; with N > 1 they are valid until `after_step`, which reuses their memory."""
        replicated = self._replicated
        if replicated is None:
            return super().gradients()
        found: list[Tensor | None] = []
        for index, view in enumerate(self._gradient_views):
            gradient = view if view is not None else replicated.gradient(index)
            found.append(gradient if self._used_anywhere[index] else None)
        return found

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._in_flight.clear()
        if self._filling is not None:
            self._filling.begin()
        self._used_anywhere = [False] * len(self._parameters)

    def begin_backward(self, last_micro_batch: bool) -> None:
        if self._filling is not None:
            self._filling.is_recording = last_micro_batch

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        filling, replicated = self._filling, self._replicated
        if filling is None or replicated is None:
            return self._alone(extras)
        used = filling.complete(len(self._parameters))
        filling.send_rest()
        replicated.start(used, extras)
        while self._in_flight:
            self._wait_oldest()
        self._used_anywhere, sums = replicated.wait()
        self._clear_gradients()
        return sums[: len(extras)]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._filling is None:
            return
        gathering: deque[tuple[ShardBucket, AllGather]] = deque()
        for bucket in reversed(self._filling.buckets):  # the first layers' parameters are needed first
            if len(gathering) == _MAX_IN_FLIGHT:
                _finish_gathering(*gathering.popleft())
            gathering.append((bucket, bucket.start_gathering(self.joined(), self._spare)))
        while gathering:
            _finish_gathering(*gathering.popleft())
        self._spare.clear()

    def _reduce(self, bucket: ShardBucket) -> None:
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._wait_oldest()
        self._in_flight.append((bucket, bucket.start_reducing(self.joined(), self._spare)))

    def _wait_oldest(self) -> None:
        bucket, reduction = self._in_flight[0]
        reduction.wait()
        self._in_flight.popleft()
        for scratch in reduction.scratch:
            self._spare.give(scratch)
        bucket.reduced()


def _finish_gathering(bucket: ShardBucket, gather: AllGather) -> None:
    gather.wait()
    bucket.take_gathered()
