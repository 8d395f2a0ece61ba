"""A task that tells where it is trained."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray
import torch
from torch import Tensor

from support.tiny_task import TinyTask


class PlacedTask(TinyTask):
    """Leaves a file `<trial>-<process>` in a folder, with its Ray node and its steps so far; takes its time."""

    def __init__(self, trial: int, folder: str) -> None:
        super().__init__()
        self._place = Path(folder) / f"{trial}-{os.getpid()}"
        self._steps = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self._steps += 1
            self._place.write_text(f"{ray.get_runtime_context().get_node_id()} {self._steps}\n", encoding="utf-8")
            time.sleep(0.02)
        return super().loss(outputs, batch)
