"""Bringing a model's state together from the workers that hold pieces of it, and dealing it out again.

What travels are plain tensors, one at a time, so that no worker needs memory for more than the largest of them beside
what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.collective import Collective, Pending
from orchestray.platform.errors import CheckpointError
from orchestray.trainers.exchange.base import Held
from orchestray.trainers.layout.pieces import Piece, Ranges
from orchestray.trainers.replica import agreement


@dataclass
class Entry:
    """One plain tensor, and who has what of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, Piece]] = field(default_factory=list)
    """Rank and piece, in the order of ranks; together they cover the tensor."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def describe(world: Collective, held: Mapping[str, Held]) -> dict[str, Entry]:
    """Who holds what, by plain name, the same on every rank. All ranks call.

    Raises:
        CheckpointError: a tensor is not covered by the pieces that count.
    """
    own = [
        [item.piece.name, _dtype_name(item.tensor), item.piece.shape, item.piece.ranges]
        for item in held.values()
        if item.piece.is_counted
    ]
    table: dict[str, Entry] = {}
    for rank, rows in enumerate(agreement.gather_json(world, own)):
        for name, dtype, shape, ranges in rows:
            entry = table.setdefault(name, Entry(getattr(torch, dtype), tuple(shape)))
            if not shape and entry.parts:
                continue  # a number all its holders know
            entry.parts.append((rank, Piece(name, tuple(shape), _ranges(ranges))))
    for name, entry in table.items():
        covered = sum(piece.numel for _, piece in entry.parts)
        if covered != torch.Size(entry.shape).numel():
            raise CheckpointError(
                f"The workers hold {covered} of the {torch.Size(entry.shape).numel()} elements of {name!r}: the state "
                "cannot be saved."
            )
    return table


def gather(
    world: Collective,
    table: Mapping[str, Entry],
    held: Mapping[str, Held],
    place: Callable[[str, Entry], Tensor],
    done: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Bring every tensor of the table together on rank 0, one after the other. All ranks call.

    Args:
        world: all workers.
        table: of `describe`.
        held: what this worker holds.
        place: on rank 0: gives the memory for a plain tensor, on the CPU.
        done: on rank 0: is called with each tensor once it is whole.
    """
    by_name = {item.piece.name: item for item in held.values() if item.piece.is_counted}
    sends: list[tuple[Pending, Tensor]] = []
    for name, entry in table.items():
        if world.rank == 0:
            plain = place(name, entry)
            for rank, piece in entry.parts:
                piece.put(plain, by_name[name].tensor if rank == 0 else _receive(world, rank, entry, piece))
            if done is not None:
                done(name, plain)
        elif any(rank == world.rank for rank, _ in entry.parts):
            tensor = by_name[name].tensor.detach().cpu().contiguous()
            # Tensors too are kept until they are sent.
            sends.append((world.start_exchange({0: tensor}, {}), tensor))
    for pending, _ in sends:
        pending.wait()


def _receive(world: Collective, rank: int, entry: Entry, piece: Piece) -> Tensor:
    part = torch.empty(piece.local_shape, dtype=entry.dtype)
    world.start_exchange({}, {rank: part}).wait()
    return part


Described = Sequence[Sequence[Any]]
"""Of each tensor its name, dtype's name and shape."""


def scatter(
    world: Collective, source: tuple[Described, Iterable[Tensor]] | None, wanted: Mapping[str, Piece]
) -> Iterator[tuple[str, Tensor]]:
    """Deal out plain tensors that rank 0 has. All ranks iterate to the end.

    Args:
        world: all workers.
        source: on rank 0: what the tensors are, and the tensors in that order.
        wanted: the pieces this worker wants, by a key of its own.

    Yields:
        Key and tensor of each wanted piece that there is.
    """
    described = agreement.share_json(world, None if source is None else source[0], 0)
    keys: dict[str, list[str]] = {}
    for key, piece in wanted.items():
        keys.setdefault(piece.name, []).append(key)
    tensors = iter(source[1]) if source is not None else None
    for name, dtype, shape in described:
        plain = next(tensors) if tensors is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        plain = plain.contiguous()
        world.broadcast(plain, 0)
        for key in keys.get(name, ()):
            piece = wanted[key]
            if tuple(plain.shape) != piece.shape:
                raise CheckpointError(
                    f"The saved weights do not fit the model: {name} is {list(plain.shape)}, the model's is "
                    f"{list(piece.shape)}. Build the model from the arguments the weights were saved with."
                )
            yield key, piece.take(plain)


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """What `scatter` is told of the tensors of a mapping."""
    return [[name, _dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ranges(lists: Any) -> tuple[Ranges, ...]:
    return tuple(tuple((int(start), int(stop)) for start, stop in ranges) for ranges in lists)
