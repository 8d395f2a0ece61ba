"""What a worker holds of a model, and what its optimizer changes, where parameters are stored as modules have them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.weights import model_tensors


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
