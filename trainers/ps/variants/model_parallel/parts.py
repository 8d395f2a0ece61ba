"""The parts of the plain model that each worker of a replica has servers for, and their reassembly.

Some parameters are held alike by several workers of a tensor group (norms, the biases of layers split by their input).
If each of them had servers for such a parameter, asynchronous updates would soon make the copies differ. So one worker
has servers for it, and sends its values to the others of its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.platform.comm.objects import gather_json, share_tensors
from orchestray.trainers.layout.tensor_slice import Ranges, TensorSlice
from orchestray.trainers.ps.protocol.json_state import from_json, to_json
from orchestray.trainers.ps.protocol.partition import trainable

if TYPE_CHECKING:
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.layout.groups import Groups


def owned_names(network: Network) -> list[str]:
    """Return the parameters that a worker has servers for, in its model's order."""
    pieces = network.pieces
    return [name for name, _ in trainable(network.model) if name not in pieces or pieces[name].is_counted]


def held_ranges(network: Network) -> dict[str, tuple[Ranges, ...]]:
    """Return the ranges in the plain model's tensors of the parameters and buffers that a worker holds only in part."""
    return {name: piece.ranges for name, piece in network.pieces.items() if not piece.is_whole}


class StageParts:
    """The parts of one worker, and its record of the others' parts."""

    def __init__(self, network: Network, groups: Groups) -> None:
        """Exchange the parts. All workers of a replica call this together.

        Args:
            network: network of this worker.
            groups: groups of the replica's workers.

        Raises:
            PeerLostError: another worker did not come.
        """
        self.names = owned_names(network)
        self._groups = groups
        self._parameters = dict(trainable(network.model))
        own = {name: to_json(piece) for name, piece in network.pieces.items()}
        held = gather_json(groups.model, own)
        self._pieces = [{name: from_json(TensorSlice, piece) for name, piece in each.items()} for each in held]
        """Pieces of every worker of the replica."""
        lacking = [name for name in self._parameters if name not in self.names]
        wanted = {name for names in gather_json(groups.tensor, lacking) for name in names}
        owned = gather_json(groups.tensor, [[name, self._parameters[name].numel()] for name in self.names])
        self._shared_names: list[list[tuple[str, int]]] = [
            [(name, size) for name, size in each if name in wanted] for each in owned
        ]
        """Names and element counts of the parameters that each worker of the tensor group sends to the others."""

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the parameters that this tensor group holds alike from the worker with servers for them.

        All workers of the group call this together.

        Raises:
            PeerLostError: another worker of the group is lost.
        """
        group = self._groups.tensor
        for owner, shared in enumerate(self._shared_names):
            if not shared:
                continue
            mine = owner == group.rank
            like = next(iter(self._parameters.values()))
            flat = (
                flatten([self._parameters[name] for name, _ in shared])
                if mine
                else like.new_empty(sum(size for _, size in shared))
            )
            group.broadcast(flat, owner)
            if mine:
                continue
            for (name, _), part in zip(shared, flat.split_with_sizes([size for _, size in shared]), strict=True):
                if (parameter := self._parameters.get(name)) is not None:
                    parameter.copy_(part.view(parameter.shape))

    def bring_together(self, own: Mapping[str, Tensor], *, are_slots: bool = False) -> dict[str, Tensor]:
        """Join the tensors of all workers of the replica to the plain model's, on each of them; all call together.

        Args:
            own: this worker's tensors, by name.
            are_slots: True for an optimizer's tensors, named "<parameter>.<slot>".

        Raises:
            PeerLostError: another worker is lost.
        """
        world = self._groups.model
        found: dict[str, Tensor] = {}
        for worker, pieces in enumerate(self._pieces):
            held = share_tensors(world, own if worker == world.rank else None, worker)
            for key, tensor in held.items():
                piece = pieces.get(key.rpartition(".")[0] if are_slots else key)
                if piece is None or (are_slots and tensor.shape != piece.local_shape):
                    found.setdefault(key, tensor)  # whole, or kept beside a parameter: a count of steps, a matrix
                elif piece.is_counted:
                    plain = found.get(key)
                    found[key] = plain = tensor.new_zeros(piece.shape) if plain is None else plain
                    piece.put(plain, tensor.view(piece.local_shape))
        return found


def cut_tensor(plain: Tensor, name: str, ranges: Mapping[str, tuple[Ranges, ...]]) -> Tensor:
    """Return the held part of a tensor of the plain model; the tensor itself if all of it is held.

    Args:
        plain: tensor of the plain model.
        name: name of the tensor.
        ranges: held ranges by name (`StagePlan.ranges`); not listed: all.
    """
    if name not in ranges or plain.dim() != len(ranges[name]):
        return plain
    return TensorSlice(name, tuple(plain.shape), ranges[name]).take(plain)


def cut_slots(slots: Mapping[str, Tensor], ranges: Mapping[str, tuple[Ranges, ...]]) -> dict[str, Tensor]:
    """Return the held parts (see `cut_tensor`) of an optimizer's state "<parameter>.<slot>"."""
    return {key: cut_tensor(tensor, key.rpartition(".")[0], ranges) for key, tensor in slots.items()}


def cut_module(model: nn.Module, names: tuple[str, ...], ranges: Mapping[str, tuple[Ranges, ...]]) -> nn.Module:
    """Return a module whose buffers are the held parts of the plain model's, in the order of `names`."""
    found = dict(model.named_buffers(remove_duplicate=False))
    holder = nn.Module()
    for name in names:
        holder.register_buffer(name.replace(".", "/"), cut_tensor(found[name], name, ranges))
    return holder
