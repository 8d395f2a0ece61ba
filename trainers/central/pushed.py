"""What a worker's messages hold, as a leaf server takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.central.applied import Part
from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.leaf_copies import LocalCopy
from orchestray.trainers.central.messages import COMPRESSED, RUNS, SPARSE, flat_state, sparse_to_dense
from orchestray.trainers.central.partition import Partition, slice_views
from orchestray.trainers.central.runs import Runs
from orchestray.trainers.central.state import whole_slots
from orchestray.trainers.central.upstream import Collected, Upstream

if TYPE_CHECKING:
    from orchestray.trainers.central.leaf_copies import BatchCopy
    from orchestray.trainers.compression.base import Compressor

_SLOTS = "optimizer/"


class Decode:
    """Makes gradients of pushes."""

    def __init__(self, partition: Partition, like: Tensor, *, has_buffers: bool, decoder: Compressor | None = None):
        """
        Args:
            partition: of the parameters, uncut: as the workers see them.
            like: a tensor with the shape and dtype of all parameters.
            has_buffers: whether pushes bring what shares did to the model's buffers.
            decoder: made as the workers' compressors; initialised here.
        """
        self._like = like
        self._has_buffers = has_buffers
        self._decoder = decoder
        if decoder is not None:
            decoder.init(slice_views(partition.slices(0), torch.zeros_like(like)))

    def __call__(self, worker: int, request: Mapping[str, Any], tensors: Sequence[Tensor]) -> Collected:
        """The gradient of a push, whole; what it is of is in the request."""
        push, rest = request["push"], list(tensors)
        buffers = BufferPush(*rest[-2:]) if self._has_buffers else None
        rest = rest[:-2] if self._has_buffers else rest
        _, parts, read_version = push["origin"]
        return Collected(
            worker=worker,
            orders=tuple(push["orders"]),
            loss_sums=tuple(loss_sum for _, loss_sum in request["acknowledge"]),
            parts=tuple(Part(*part) for part in parts),
            read_version=int(read_version),
            gradient=self._gradient(push["encoding"], rest),
            unused=frozenset(push["unused"]),
            buffers=buffers,
        )

    def _gradient(self, encoding: str, tensors: list[Tensor]) -> Tensor:
        if encoding == COMPRESSED:
            if self._decoder is None:
                raise TrainingError("A worker sent a compressed gradient, and this server knows of no compression.")
            return torch.cat([part.reshape(-1) for part in self._decoder.decompress(tensors[0])])
        if encoding == SPARSE:
            return sparse_to_dense(tensors[0], tensors[1], torch.empty_like(self._like))
        if encoding == RUNS:
            return Runs(*tensors).fill(torch.empty_like(self._like))
        return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def snapshot_of(
    upstream: Upstream, copy: BatchCopy | LocalCopy, step: int | None
) -> tuple[list[str], list[Tensor], Any]:
    """What all shards hold, as one server that holds everything would tell it: names, tensors, and what it says of the
    run. Where leaf servers have optimizers, the state is that of this leaf's.
    """
    snapshots, told = upstream.snapshots(step)
    whole = {"values": torch.cat([snapshot["values"] for snapshot in snapshots])}
    if isinstance(copy, LocalCopy):
        whole |= {f"{_SLOTS}{name}": tensor for name, tensor in copy.shard.optimizer_slots().items()}
    else:
        for name, tensor in whole_slots(upstream.partition, snapshots).items():
            owner, _, slot = name.rpartition(".")
            whole[f"{_SLOTS}{owner}:0.{slot}"] = tensor
    whole |= {name: tensor for name, tensor in snapshots[0].items() if name.startswith("buffers/")}
    names, tensors = flat_state(whole)
    return names, tensors, told
