"""A task whose score is a formula of its own arguments: a trial takes milliseconds, and its answer is known."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from support.patience import PATIENCE_S
from support.tiny_task import TinyTask


class FormulaTask(TinyTask):
    """A task whose metrics are formulas of its arguments.

    Metrics: `ones`, the sum of the arguments (OneMax, where they are bits); `sphere`, minus the sum of squares of their
    distances from 1; `process`, the id of the process that evaluates.
    """

    def __init__(self, meeting: str = "", **numbers: float) -> None:
        """
        Args:
            meeting: folder in which two processes meet before the first one answers; empty: none waits for another.
            numbers: arguments of the formulas.
        """
        super().__init__(num_samples=2)
        self.meeting, self.numbers = meeting, numbers

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.meeting:
            place = Path(self.meeting)
            (place / str(os.getpid())).touch()
            deadline_s = time.monotonic() + PATIENCE_S
            while len(list(place.iterdir())) < 2:
                assert time.monotonic() < deadline_s, "a second process: never"
                time.sleep(0.01)
        numbers = torch.tensor([float(number) for number in self.numbers.values()], dtype=torch.float64)
        process = torch.tensor(float(os.getpid()), dtype=torch.float64)
        return {"ones": numbers.sum(), "sphere": -((numbers - 1.0) ** 2).sum(), "process": process}
