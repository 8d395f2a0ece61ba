"""The plain model's state and a parameter server's: cut into shards, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.trainers.central.buffers import Buffers
from orchestray.trainers.central.partition import Partition, Slice
from orchestray.trainers.weights import model_tensors

_SLOTS = "optimizer/"


def slots_of_shard(slices: Sequence[Slice], optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a checkpoint's optimizer state, "<parameter>.<slot>", what a shard's optimizer loads."""
    found: dict[str, Tensor] = {}
    for piece in slices:
        for key, tensor in optimizer.items():
            name, _, slot = key.rpartition(".")
            if name != piece.name:
                continue
            is_whole = tensor.dim() == 0 or piece.is_whole
            found[f"{name}:{piece.start}.{slot}"] = tensor if is_whole else tensor.reshape(-1)[piece.start : piece.stop]
    return found


def whole_slots(partition: Partition, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The optimizer's state in the plain model's shapes, "<parameter>.<slot>", from every shard's snapshot."""
    parts: dict[str, list[Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard, snapshot in enumerate(snapshots):
        by_key = {f"{piece.name}:{piece.start}": piece for piece in partition.slices(shard)}
        for key, tensor in snapshot.items():
            if not key.startswith(_SLOTS):
                continue
            owner, _, slot = key.removeprefix(_SLOTS).rpartition(".")
            piece = by_key[owner]
            name = f"{piece.name}.{slot}"
            shapes[name] = piece.shape
            parts.setdefault(name, []).append(tensor)
    return {
        name: found[0].clone()
        if name.endswith(".step")
        else torch.cat([t.reshape(-1) for t in found]).view(shapes[name])
        for name, found in parts.items()
    }


@torch.no_grad()
def load_values(model: nn.Module, flat: Tensor, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Make a worker's model what the servers hold; returns its tensors.

    Args:
        model: whose trainable parameters are views of `flat`.
        flat: all of them.
        snapshots: of every shard, in order; the lead's has the buffers.
    """
    torch.cat([snapshot["values"] for snapshot in snapshots], out=flat)
    if "buffers/floats" in snapshots[0]:
        Buffers(snapshots[0]["buffers/floats"], snapshots[0]["buffers/integers"]).write_to(model)
    return model_tensors(model)
