"""The state of the plain model and of the parameter servers: cut into shards, and joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.partition import Partition, Slice

SLOTS = "optimizer/"
"""Prefix of the names of the optimizer's state, in a snapshot of a shard."""


def slots_of_shard(slices: Sequence[Slice], optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a checkpoint's optimizer state that a shard's optimizer loads.

    Args:
        slices: slices of the shard.
        optimizer: optimizer state by "<parameter>.<slot>".

    Returns:
        Tensors by "<parameter>:<start>.<slot>".
    """
    found: dict[str, Tensor] = {}
    for piece in slices:
        for key, tensor in optimizer.items():
            name, _, slot = key.rpartition(".")
            if name != piece.name:
                continue
            is_whole = tensor.dim() == 0 or piece.is_whole
            found[f"{piece.key}.{slot}"] = tensor if is_whole else tensor.reshape(-1)[piece.start : piece.stop]
    return found


def whole_slots(partition: Partition, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join every shard's snapshot to the optimizer's state in the plain model's shapes, by "<parameter>.<slot>"."""
    parts: dict[str, list[Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard, snapshot in enumerate(snapshots):
        by_key = {piece.key: piece for piece in partition.slices(shard)}
        for key, tensor in snapshot.items():
            if not key.startswith(SLOTS):
                continue
            owner, _, slot = key.removeprefix(SLOTS).rpartition(".")
            piece = by_key[owner]
            name = f"{piece.name}.{slot}"
            # A slot that is kept beside a whole parameter may have a shape of its own.
            shapes[name] = tuple(tensor.shape) if piece.is_whole else piece.shape
            parts.setdefault(name, []).append(tensor)
    return {
        name: found[0].clone() if name.endswith(".step") else flatten(found).view(shapes[name])
        for name, found in parts.items()
    }


@torch.no_grad()
def load_values(model: nn.Module, flat: Tensor, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Write the servers' values into a worker's model; return the model's tensors.

    Args:
        model: model whose trainable parameters are views of `flat`.
        flat: all trainable parameters, `[elements]`.
        snapshots: snapshot of every shard, in order; the lead's has the buffers.
    """
    torch.cat([snapshot["values"] for snapshot in snapshots], out=flat)
    if "buffers/floats" in snapshots[0]:
        Buffers(snapshots[0]["buffers/floats"], snapshots[0]["buffers/integers"]).write_to(model)
    return model_tensors(model)
