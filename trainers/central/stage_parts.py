"""Which part of the plain model a worker of a replica has servers for, and how the parts become whole again.

What several workers of a tensor group hold alike (norms, the biases of layers split by their input) would otherwise be
held by the servers of each of them, which asynchronous updates would soon have differ: one worker has servers for it,
and tells the others of its group what these hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.trainers.central.partition import trainable
from orchestray.trainers.layout.pieces import Piece, Ranges
from orchestray.trainers.replica.agreement import gather_json, share_tensors

if TYPE_CHECKING:
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.network.base import Network


def owned_names(network: Network) -> list[str]:
    """The parameters a worker has servers for, in its model's order."""
    pieces = network.pieces
    return [name for name, _ in trainable(network.model) if name not in pieces or pieces[name].is_counted]


def held_ranges(network: Network) -> dict[str, tuple[Ranges, ...]]:
    """Of the parameters and buffers a worker holds only a part of, which part of the plain model's."""
    return {name: piece.ranges for name, piece in network.pieces.items() if not piece.is_whole}


class StageParts:
    """The parts of one worker, and what it knows of the others'."""

    def __init__(self, network: Network, groups: Groups) -> None:
        """All workers of a replica make theirs together.

        Raises:
            PeerLostError: another worker did not come.
        """
        self.names = owned_names(network)
        self._groups = groups
        self._parameters = dict(trainable(network.model))
        own = {name: asdict(piece) for name, piece in network.pieces.items()}
        self._pieces = [_from_json(told) for told in gather_json(groups.model, own)]
        """Of every worker of the replica."""
        lacking = [name for name in self._parameters if name not in self.names]
        wanted = {name for told in gather_json(groups.tensor, lacking) for name in told}
        owned = gather_json(groups.tensor, [[name, self._parameters[name].numel()] for name in self.names])
        self._told: list[list[tuple[str, int]]] = [[(n, size) for n, size in each if n in wanted] for each in owned]
        """Of each worker of the tensor group what it tells the others, with the elements."""

    @torch.no_grad()
    def spread(self) -> None:
        """Have what this tensor group holds alike be what the one of it with servers for it has. All of it call.

        Raises:
            PeerLostError: another worker of the group is lost.
        """
        group = self._groups.tensor
        for owner, told in enumerate(self._told):
            if not told:
                continue
            mine = owner == group.rank
            like = next(iter(self._parameters.values()))
            flat = (
                torch.cat([self._parameters[name].reshape(-1) for name, _ in told])
                if mine
                else like.new_empty(sum(size for _, size in told))
            )
            group.broadcast(flat, owner)
            if mine:
                continue
            for (name, _), part in zip(told, flat.split_with_sizes([size for _, size in told]), strict=True):
                if (parameter := self._parameters.get(name)) is not None:
                    parameter.copy_(part.view(parameter.shape))

    def bring_together(self, own: Mapping[str, Tensor], *, are_slots: bool = False) -> dict[str, Tensor]:
        """The plain model's tensors from those of all workers of the replica, on each of them; all call together.

        Args:
            own: this worker's, by name.
            are_slots: they are an optimizer's, "<parameter>.<slot>".

        Raises:
            PeerLostError: another worker is lost.
        """
        world = self._groups.model
        found: dict[str, Tensor] = {}
        for worker, pieces in enumerate(self._pieces):
            held = share_tensors(world, own if worker == world.rank else None, worker)
            for key, tensor in held.items():
                piece = pieces.get(key.rpartition(".")[0] if are_slots else key)
                if piece is None or (tensor.dim() == 0 and piece.shape):
                    found.setdefault(key, tensor)  # whole, or the count of an optimizer's steps
                elif piece.is_counted:
                    plain = found.get(key)
                    found[key] = plain = tensor.new_zeros(piece.shape) if plain is None else plain
                    piece.put(plain, tensor.view(piece.local_shape))
        return found


def cut_tensor(plain: Tensor, name: str, ranges: Mapping[str, tuple[Ranges, ...]]) -> Tensor:
    """What is held of a tensor of the plain model; the tensor itself where that is all."""
    if name not in ranges or plain.dim() != len(ranges[name]):
        return plain
    return Piece(name, tuple(plain.shape), ranges[name]).take(plain)


def cut_slots(slots: Mapping[str, Tensor], ranges: Mapping[str, tuple[Ranges, ...]]) -> dict[str, Tensor]:
    """As `cut_tensor`, of an optimizer's state "<parameter>.<slot>"."""
    return {key: cut_tensor(tensor, key.rpartition(".")[0], ranges) for key, tensor in slots.items()}


def cut_module(model: nn.Module, names: tuple[str, ...], ranges: Mapping[str, tuple[Ranges, ...]]) -> nn.Module:
    """A module of buffers that are what is held of the plain model's, in the order of `names`."""
    found = dict(model.named_buffers(remove_duplicate=False))
    holder = nn.Module()
    for name in names:
        holder.register_buffer(name.replace(".", "/"), cut_tensor(found[name], name, ranges))
    return holder


def _from_json(told: Mapping[str, Any]) -> dict[str, Piece]:
    return {
        name: Piece(
            piece["name"],
            tuple(piece["shape"]),
            tuple(tuple((start, stop) for start, stop in ranges) for ranges in piece["ranges"]),
            piece["is_counted"],
        )
        for name, piece in told.items()
    }
