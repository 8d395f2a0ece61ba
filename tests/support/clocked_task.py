"""A task that writes down when each of its steps computes its loss."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from support.tiny_task import TinyTask


class ClockedTask(TinyTask):
    """The tiny task, with the times of its start and of each step's loss, in seconds, as lines of a file."""

    def __init__(self, folder: str, name: str) -> None:
        super().__init__()
        self._file = Path(folder) / name
        self._file.write_text(f"{time.time()!r}\n")

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            with self._file.open("a") as file:
                print(time.time(), file=file)
        return super().loss(outputs, batch)
