"""The tensors that a worker holds and its optimizer updates, if parameters are stored as modules have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from orchestray.trainers.core.exchange import LocalTensor, OptimizedTensor
from orchestray.trainers.core.own_saving import own_tensors
from orchestray.trainers.layout.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from orchestray.trainers.optim.optimizers import Optimizer


def held_tensors(model: nn.Module, pieces: Mapping[str, TensorSlice] | None) -> dict[str, LocalTensor]:
    """Return parameters and persistent buffers by name, tied ones once.

    Args:
        model: this worker's part of the model.
        pieces: slices of the tensors that are not whole here, by name.
    """
    held: dict[str, LocalTensor] = {}
    seen: set[int] = set()
    for name, tensor in own_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            piece = (pieces or {}).get(name) or TensorSlice.whole(name, tensor.shape)
            held[name] = LocalTensor(tensor.detach(), piece)
    return held


def with_present_buffers(
    model: nn.Module, held: Mapping[str, LocalTensor], *, is_first: bool
) -> dict[str, LocalTensor]:
    """Return the same as `held_tensors` gave, with the persistent buffers that the model has now.

    Args:
        model: this worker's part of the model.
        held: earlier result of `held_tensors`.
        is_first: True if this replica counts a buffer that has come since.
    """
    present: dict[str, LocalTensor] = {}
    for name, tensor in own_tensors(model).items():
        known = held.get(name)
        if isinstance(tensor, nn.Parameter):
            if known is not None:
                present[name] = known
            continue
        if known is None and any(tensor is other.tensor for other in present.values()):
            continue
        piece = TensorSlice.whole(name, tensor.shape, is_counted=is_first) if known is None else known.piece
        if piece.is_whole and piece.shape != tensor.shape:
            piece = TensorSlice.whole(piece.name, tensor.shape, is_counted=piece.is_counted)
        present[name] = LocalTensor(tensor, piece)
    return present


def updated_whole(model: nn.Module, held: Mapping[str, LocalTensor]) -> list[OptimizedTensor]:
    """Return every trainable parameter, in the model's order."""
    return [
        OptimizedTensor(name, parameter, held[name].piece)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def held_slots(optimizer: Optimizer, updates: Iterable[OptimizedTensor]) -> dict[str, LocalTensor]:
    """Return the optimizer's state as this worker holds it, by "<parameter>.<slot>" with the worker's own names."""
    piece_of = {update.name: update.piece for update in updates}
    held: dict[str, LocalTensor] = {}
    for key, tensor in optimizer.state_tensors().items():
        name, _, slot = key.rpartition(".")
        held[key] = LocalTensor(tensor, optimizer.slot_piece(name, slot, piece_of[name]))
    return held


def wanted_slots(optimizer: Optimizer, updates: Iterable[OptimizedTensor]) -> dict[str, TensorSlice]:
    """Return the slice of each slot of `held_slots`, including slots that are not set yet."""
    return {
        f"{update.name}.{slot}": optimizer.slot_piece(update.name, slot, update.piece)
        for update in updates
        for slot in optimizer.slots_of(update.name)
    }
