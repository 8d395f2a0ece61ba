"""A task whose steps take a while for as long as a file is there: time to do something to the run."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from support.tiny_task import TinyTask

STEP_S = 0.3


class SlowTask(TinyTask):
    """As `TinyTask`; while the file `slow` is there, each share of a step takes `STEP_S` seconds longer."""

    def __init__(self, slow: str) -> None:
        super().__init__(num_samples=80)
        self._slow = Path(slow)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and self._slow.exists():
            time.sleep(STEP_S)
        return super().loss(outputs, batch)
