"""Buffers of a model that no worker holds whole: what a checkpoint has of them beside the model's own file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from orchestray.platform.comm import objects
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.buffer_kinds import Kind, differences, kinds_of, transient
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.core.members import member_name
from orchestray.trainers.layout.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from orchestray.trainers.loop.replica import Replica

_CONSTANT = "_constant_"
"""Begin of the names of tensors that a stage of a pipeline has besides those of the model."""


def changed_kinds(replica: Replica) -> dict[str, Kind | None]:
    """Return the buffers whose dtype or shape is not that of the plain model as it was built. All workers call.

    Raises:
        TrainingError: it is one of which each worker of a tensor group holds a part.
    """
    model, pieces = replica.model, replica.network.pieces
    own: dict[str, Kind] = {}
    for name, (dtype, shape, is_saved) in kinds_of(model).items():
        piece = pieces.get(name)
        if name.startswith(_CONSTANT):
            continue
        if piece is None or piece.is_whole:
            own[name] = [dtype, shape, is_saved]
        elif tuple(shape) != piece.local_shape:
            raise TrainingError(
                f"The buffer {name!r} has got another shape, and its layer is split over the tensor workers. Give it "
                "its full size in build_model, or use strategy.network.tensor: 1."
            )
    built = {name: kind for name, kind in replica.built.items() if name in own or _is_gone(model, name)}
    changed = differences(own, built)
    merged: dict[str, Kind | None] = {}
    for each in objects.gather_json(replica.world, changed):
        merged |= each
    return merged


def _is_gone(model: nn.Module, name: str) -> bool:
    """Return True if the module of a buffer is here without it."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return False
    return leaf in owner._buffers and owner._buffers[leaf] is None


def held_transient(replica: Replica, *, of_each_replica: bool = False) -> dict[str, LocalTensor]:
    """Return the buffers that `state_dict` leaves out as this worker holds them. All workers call.

    Args:
        replica: replica of this worker, which is connected.
        of_each_replica: True to count a buffer once for each replica; False to count that of the first alone. Each
            member of an ensemble counts its own, under names of its own.
    """
    index, num_members = replica.groups.coordinate.data, replica.settings.num_members
    counts = of_each_replica or bool(num_members) or index == 0
    held = {}
    for name, tensor in transient(replica.model).items():
        if name.startswith(_CONSTANT):
            continue
        piece = replica.network.pieces.get(name) or TensorSlice.whole(name, tensor.shape)
        if piece.is_whole:  # it may have another shape now
            piece = TensorSlice.whole(piece.name, tensor.shape, is_counted=piece.is_counted)
        saved = member_name(index, piece.name) if num_members else piece.name
        held[name] = LocalTensor(tensor, replace(piece, name=saved).counted(counts))
    # Two stages of a pipeline may look up the same buffer.
    mine = [[index, item.piece.name] for item in held.values() if item.piece.is_counted and item.piece.is_whole]
    before = [entry for each in objects.gather_json(replica.world, mine)[: replica.world.rank] for entry in each]
    return {n: LocalTensor(t, p.counted(not p.is_whole or [index, p.name] not in before)) for n, (t, p) in held.items()}
