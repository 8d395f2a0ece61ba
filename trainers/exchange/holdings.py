"""What a worker holds of a model, and what its optimizer changes, where parameters are stored as modules have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.weights import model_tensors

if TYPE_CHECKING:
    from orchestray.trainers.optimizers import Optimizer


def held_tensors(model: nn.Module, pieces: Mapping[str, Piece] | None, *, is_counted: bool) -> dict[str, Held]:
    """Parameters and persistent buffers by name, tied ones once; `is_counted` False: another replica counts them."""
    held = {}
    own = model.state_dict()
    for name in model_tensors(model):
        tensor = own[name].detach()  # the model's memory, contiguous or not
        piece = (pieces or {}).get(name) or Piece.whole(name, tensor.shape)
        held[name] = Held(tensor, piece.counted(is_counted))
    return held


def updated_whole(model: nn.Module, held: Mapping[str, Held]) -> list[Update]:
    """Every trainable parameter, in the model's order."""
    return [
        Update(name, parameter, held[name].piece)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def held_slots(optimizer: Optimizer, updates: Iterable[Update]) -> dict[str, Held]:
    """The optimizer's state as this worker holds it, by "<parameter>.<slot>" with the worker's own names."""
    piece_of = {update.name: update.piece for update in updates}
    held: dict[str, Held] = {}
    for key, tensor in optimizer.state_tensors().items():
        name, _, slot = key.rpartition(".")
        piece = piece_of[name]
        plain_key = f"{piece.name}.{slot}"
        if slot in optimizer.whole_slots:
            held[key] = Held(tensor, Piece.whole(plain_key, tensor.shape, is_counted=piece.is_counted))
        else:
            held[key] = Held(tensor, Piece(plain_key, piece.shape, piece.ranges, piece.is_counted))
    return held


def wanted_slots(optimizer: Optimizer, updates: Iterable[Update]) -> dict[str, Piece]:
    """Where each slot of `held_slots` lies, also of those that are not set yet."""
    wanted = {}
    for update in updates:
        for slot in optimizer.slots:
            key, plain = f"{update.name}.{slot}", f"{update.piece.name}.{slot}"
            if slot in optimizer.whole_slots:
                wanted[key] = Piece.whole(plain, optimizer.whole_slots[slot])
            else:
                wanted[key] = Piece(plain, update.piece.shape, update.piece.ranges)
    return wanted
