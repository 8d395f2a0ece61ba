"""A task that tells where it is trained."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray
import torch
from torch import Tensor

from support.slow_digits import Slowing
from support.tiny_task import TinyTask

HELD_AT = 10
"""The step at which trials wait."""
FIRST_HELD = 2
"""The trial from which on they do."""
_LOOK_S = 0.02


class PlacedTask(TinyTask):
    """A task that leaves a file `<trial>-<process>` in a folder, with its Ray node and its steps so far.

    While the file `hold` is there, each trial from `FIRST_HELD` on waits in step `HELD_AT`.
    """

    def __init__(self, trial: int, folder: str, hold: str) -> None:
        super().__init__()
        self._place = Path(folder) / f"{trial}-{os.getpid()}"
        self._hold = Path(hold)
        self._waits = trial >= FIRST_HELD and type(self) is PlacedTask
        self._steps = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self._steps += 1
            self._place.write_text(f"{ray.get_runtime_context().get_node_id()} {self._steps}\n", encoding="utf-8")
            while self._waits and self._steps == HELD_AT and self._hold.exists():
                time.sleep(_LOOK_S)
        return super().loss(outputs, batch)


class UnhurriedTask(PlacedTask):
    """A task that tells where it is trained, and whose steps take ever longer while `hold` is there: see `Slowing`."""

    def __init__(self, trial: int, folder: str, hold: str) -> None:
        super().__init__(trial, folder, hold)
        self._slowing = Slowing(hold)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self._slowing.pause()
        return super().loss(outputs, batch)
