"""What an exchange does where its scheme asks for nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orchestray.trainers.exchange.base import Held
    from orchestray.trainers.layout.pieces import Piece


class Defaults:
    """Of `Exchange`: a scheme that keeps nothing beside the model, and has nothing to say."""

    def begin_backward(self, last_micro_batch: bool) -> None:
        return

    def rest(self) -> None:
        return

    def after_step(self, step: int) -> None:
        return

    def state(self) -> dict[str, Held]:
        return {}

    def wanted(self) -> dict[str, Piece]:
        return {name: held.piece for name, held in self.state().items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for name, held in self.state().items():
            held.tensor.copy_(tensors[name])

    def report(self) -> dict[str, float]:
        return {}

    def told(self) -> dict[str, Any]:
        return {}
