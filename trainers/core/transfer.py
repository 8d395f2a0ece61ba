"""Gathering of a model's state from the workers that hold pieces of it, and scattering to them.

Plain tensors are transferred one at a time. So a worker needs memory for at most the largest of them besides its own
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import Ranges, TensorSlice


@dataclass
class Entry:
    """A plain tensor, and the ranks that hold its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, TensorSlice]] = field(default_factory=list)
    """Rank and piece, ordered by rank; together the pieces cover the tensor."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def describe(world: Collective, held: Mapping[str, LocalTensor]) -> dict[str, Entry]:
    """Return the holders of each plain tensor by its name, the same on every rank. All ranks call.

    Raises:
        CheckpointError: the counted pieces do not cover a tensor.
    """
    own = [
        [item.piece.name, _dtype_name(item.tensor), item.piece.shape, item.piece.ranges]
        for item in held.values()
        if item.piece.is_counted
    ]
    table: dict[str, Entry] = {}
    for rank, rows in enumerate(objects.gather_json(world, own)):
        for name, dtype, shape, ranges in rows:
            entry = table.setdefault(name, Entry(getattr(torch, dtype), tuple(shape)))
            if not shape and entry.parts:
                continue  # a scalar that all its holders have
            entry.parts.append((rank, TensorSlice(name, tuple(shape), _ranges(ranges))))
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
    held: Mapping[str, LocalTensor],
    place: Callable[[str, Entry], Tensor],
    done: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Gather every tensor of the table on rank 0, one after the other. All ranks call.

    Args:
        world: all workers.
        table: result of `describe`.
        held: tensors on this worker.
        place: on rank 0: returns the CPU memory for a plain tensor.
        done: on rank 0: called with each tensor when it is complete.
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
            # The tensors must stay alive until they are sent.
            sends.append((world.start_exchange({0: tensor}, {}), tensor))
    for pending, _ in sends:
        pending.wait()


def _receive(world: Collective, rank: int, entry: Entry, piece: TensorSlice) -> Tensor:
    part = torch.empty(piece.local_shape, dtype=entry.dtype)
    world.start_exchange({}, {rank: part}).wait()
    return part


Described = Sequence[Sequence[Any]]
"""Name, dtype's name and shape of each tensor."""


def scatter(
    world: Collective, source: tuple[Described, Iterable[Tensor]] | None, wanted: Mapping[str, TensorSlice]
) -> Iterator[tuple[str, Tensor]]:
    """Scatter plain tensors from rank 0. All ranks iterate to the end.

    Args:
        world: all workers.
        source: on rank 0: descriptions of the tensors, and the tensors in the same order.
        wanted: pieces that this worker needs, by a key that the caller chooses.

    Yields:
        Key and tensor of each wanted piece that exists.
    """
    described = objects.share_json(world, None if source is None else source[0], 0)
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


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ranges(lists: Any) -> tuple[Ranges, ...]:
    return tuple(tuple((int(start), int(stop)) for start, stop in ranges) for ranges in lists)
