"""The built-in digits, whose steps take a while for as long as a file is there: time to do something to the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.tasks.digits import Digits

MICRO_BATCH_S = 0.02


class SlowDigits(Digits):
    """As `Digits`; while the file `slow` is there, each micro-batch takes `MICRO_BATCH_S` seconds longer."""

    def __init__(self, slow: str | None = None, **digits: Any) -> None:
        super().__init__(**digits)
        self._slow = None if slow is None else Path(slow)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._slow is not None and torch.is_grad_enabled() and self._slow.exists():
            time.sleep(MICRO_BATCH_S)
        return super().loss(outputs, batch)
