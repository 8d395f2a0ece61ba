"""The parts of the plain model that each worker of a replica has servers for, and their reassembly.

Some parameters are held alike by several workers of a tensor group (norms, the biases of layers split by their input).
If each of them had servers for such a parameter, asynchronous updates would soon make the copies differ. So one worker
has servers for it, and sends its values to the others of its group.

The same holds for each parameter that is cut, if the optimizer has to see whole ones: one worker gets all parts of its
gradient and has servers for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.comm.objects import gather_json, share_tensors
from orchestray.trainers.layout.tensor_slice import Ranges, TensorSlice
from orchestray.trainers.ps.protocol.json_state import from_json, to_json
from orchestray.trainers.ps.protocol.partition import Unit, trainable

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.layout.groups import Groups


class Owners(NamedTuple):
    """The workers of a tensor group that have servers for whole parameters."""

    ranks: dict[str, int]
    """Rank of the worker, by the name of the parameter; not listed: each worker has servers for its part."""
    cut: dict[str, tuple[int, ...]]
    """Shape of each of these parameters of which several workers hold parts."""


def owned_names(network: Network, owners: Mapping[str, int], rank: int) -> list[str]:
    """Return the parameters that a worker has servers for, in its model's order.

    Args:
        network: network of the worker.
        owners: see `Owners.ranks`.
        rank: rank of the worker in its tensor group.
    """
    pieces = network.pieces
    names = [name for name, _ in trainable(network.model)]
    return [name for name in names if owners.get(name, rank) == rank and (name in owners or _counts(pieces, name))]


def _counts(pieces: Mapping[str, TensorSlice], name: str) -> bool:
    return name not in pieces or pieces[name].is_counted


def owners_of_whole(network: Network, group: Collective, unit: Unit) -> Owners:
    """Return which worker of a tensor group has the servers of each parameter, if these hold whole ones; all call.

    The parameters of a module have the same owner. The modules that are cut are dealt out by their elements, the
    largest first.

    Args:
        network: network of this worker.
        group: the tensor group.
        unit: smallest part that a server holds whole.
    """
    if unit == "element":
        return Owners({}, {})
    own = {name: to_json(network.pieces[name]) for name, _ in trainable(network.model) if name in network.pieces}
    modules: dict[str, list[tuple[str, int, TensorSlice]]] = {}
    for rank, held in enumerate(gather_json(group, own)):
        for name, piece in held.items():
            part = from_json(TensorSlice, piece)
            if part.numel:
                modules.setdefault(name.rpartition(".")[0], []).append((name, rank, part))
    owners = Owners({}, {})
    loads = [0] * group.size

    def give(parts: Sequence[tuple[str, int, TensorSlice]], owner: int) -> None:
        owners.ranks.update((name, owner) for name, _, _ in parts)
        owners.cut.update((name, part.shape) for name, _, part in parts if not part.is_whole)
        loads[owner] += _num_elements(parts)

    cut = []
    for parts in modules.values():
        if all(part.is_whole for _, _, part in parts):
            give(parts, next(rank for _, rank, part in parts if part.is_counted))
        else:
            cut.append(parts)
    for parts in sorted(cut, key=_num_elements, reverse=True):
        give(parts, min(range(group.size), key=lambda rank: (loads[rank], rank)))
    return owners


def _num_elements(parts: Sequence[tuple[str, int, TensorSlice]]) -> int:
    return sum(math.prod(shape) for shape in {name: part.shape for name, _, part in parts}.values())


def held_ranges(network: Network) -> dict[str, tuple[Ranges, ...]]:
    """Return the ranges in the plain model's tensors of the parameters and buffers that a worker holds only in part."""
    return {name: piece.ranges for name, piece in network.pieces.items() if not piece.is_whole}


class HeldParameters(nn.Module):
    """The parameters that a worker has servers for, by their names in the model."""

    def __init__(self, held: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._held = dict(held)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._held.items()


class StageParts:
    """The parts of one worker, and its record of the others' parts."""

    def __init__(self, network: Network, groups: Groups, unit: Unit = "element") -> None:
        """Exchange the parts. All workers of a replica call this together.

        Args:
            network: network of this worker.
            groups: groups of the replica's workers.
            unit: smallest part that a server holds whole.

        Raises:
            PeerLostError: another worker did not come.
        """
        self._groups, self._own_pieces = groups, network.pieces
        self._holds_whole = unit != "element"
        owners, self._cut = owners_of_whole(network, groups.tensor, unit)
        self.names = owned_names(network, owners, groups.tensor.rank)
        self._parameters = dict(trainable(network.model))
        self.held = HeldParameters(
            {
                name: nn.Parameter(self._parameters[name].new_zeros(self._cut[name]))
                if name in self._cut
                else self._parameters[name]
                for name in self.names
            }
        )
        own = {name: to_json(piece) for name, piece in network.pieces.items()}
        held = gather_json(groups.model, own)
        self._pieces = [{name: from_json(TensorSlice, piece) for name, piece in each.items()} for each in held]
        """Pieces of every worker of the replica."""
        lacking = [
            name
            for name, parameter in self._parameters.items()
            if (name not in self.names and (parameter.numel() or not self._holds_whole)) or name in self._cut
        ]
        wanted = {name for names in gather_json(groups.tensor, lacking) for name in names}
        owned = gather_json(groups.tensor, [[name, held.numel()] for name, held in self.held.named_parameters()])
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
            held = dict(self.held.named_parameters())
            flat = (
                flatten([held[name] for name, _ in shared]) if mine else like.new_empty(sum(size for _, size in shared))
            )
            group.broadcast(flat, owner)
            for (name, _), part in zip(shared, flat.split_with_sizes([size for _, size in shared]), strict=True):
                if (parameter := self._parameters.get(name)) is None or (mine and name not in self._cut):
                    continue
                whole = part.view(self._cut.get(name, parameter.shape))
                parameter.copy_(self._own_pieces[name].take(whole) if name in self._cut else whole)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Put the gradients' parts together on the workers whose servers hold whole parameters.

        All workers of the tensor group call this together.

        Raises:
            PeerLostError: another worker of the group is lost.
        """
        if not self._cut:
            return
        like = next(iter(self._parameters.values()))
        found = {name: like.new_zeros(shape) for name, shape in self._cut.items()}
        used = like.new_zeros(len(found))
        for index, (name, whole) in enumerate(found.items()):
            gradient, piece = self._parameters[name].grad, self._own_pieces[name]
            if gradient is not None and piece.numel and piece.is_counted:
                piece.put(whole, gradient)
                used[index] = 1.0
        total = flatten([*found.values(), used])
        self._groups.tensor.all_reduce(total)
        *wholes, used = unflatten(total, [*found.values(), used])
        held = dict(self.held.named_parameters())
        for name, whole, is_used in zip(found, wholes, used.tolist(), strict=True):
            if name in held:
                held[name].grad = whole if is_used else None

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
                if piece is None or (are_slots and (self._holds_whole or tensor.shape != piece.local_shape)):
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
