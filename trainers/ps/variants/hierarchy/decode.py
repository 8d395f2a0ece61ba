"""The decoding of workers' messages by a leaf server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.messages import flat_state, sparse_to_dense
from orchestray.trainers.ps.protocol.partition import Partition, slice_views
from orchestray.trainers.ps.protocol.requests import COMPRESSED, RUNS, SPARSE, Encoding, Push, Report
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient
from orchestray.trainers.ps.protocol.state import whole_slots
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Collected, Upstream
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import LocalCopy

if TYPE_CHECKING:
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.ps.variants.hierarchy.leaf_copies import BatchCopy

_SLOTS = "optimizer/"


class Decode:
    """A decoder that makes gradients of workers' pushes."""

    def __init__(self, partition: Partition, like: Tensor, *, has_buffers: bool, decoder: Compressor | None = None):
        """
        Args:
            partition: partition of the parameters into a single shard, as the workers see it.
            like: tensor with the shape and dtype of all parameters.
            has_buffers: True if pushes bring the changes of the model's buffers.
            decoder: compressor made like the workers' compressors; initialised here.
        """
        self._like = like
        self._has_buffers = has_buffers
        self._decoder = decoder
        if decoder is not None:
            decoder.init(slice_views(partition.slices(0), torch.zeros_like(like)))

    def __call__(self, worker: int, push: Push, reports: Sequence[Report], tensors: Sequence[Tensor]) -> Collected:
        """Return the gradient of a push, whole, with its origin and the reports that come with it."""
        rest = list(tensors)
        buffers = BufferPush(*rest[-2:]) if self._has_buffers else None
        rest = rest[:-2] if self._has_buffers else rest
        return Collected(
            worker=worker,
            orders=push.orders,
            loss_sums=tuple(report.loss_sum for report in reports),
            parts=push.origin.parts,
            read_version=push.origin.read_version,
            gradient=self._gradient(push.encoding, rest),
            unused=frozenset(push.unused),
            buffers=buffers,
        )

    def _gradient(self, encoding: Encoding, tensors: list[Tensor]) -> Tensor:
        if encoding == COMPRESSED:
            if self._decoder is None:
                raise TrainingError("A worker sent a compressed gradient, and this server knows of no compression.")
            return flatten(self._decoder.decompress(tensors[0]))
        if encoding == SPARSE:
            return sparse_to_dense(tensors[0], tensors[1], torch.empty_like(self._like))
        if encoding == RUNS:
            return RowSparseGradient(*tensors).fill(torch.empty_like(self._like))
        return tensors[0] if len(tensors) == 1 else flatten(tensors)


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
        whole |= {f"{_SLOTS}{name}": tensor for name, tensor in copy.shard.optimizer_slots().items()}
    else:
        for name, tensor in whole_slots(upstream.partition, snapshots).items():
            owner, _, slot = name.rpartition(".")
            whole[f"{_SLOTS}{owner}:0.{slot}"] = tensor
    whole |= {name: tensor for name, tensor in snapshots[0].items() if name.startswith("buffers/")}
    names, tensors = flat_state(whole)
    return names, tensors, run_state
