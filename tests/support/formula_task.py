"""A task whose score is a formula of its own arguments: a trial takes milliseconds, and its answer is known."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from support.tiny_task import TinyTask


class FormulaTask(TinyTask):
    """A task whose metrics are formulas of its arguments.

    Metrics: `ones`, the sum of the arguments (OneMax, where they are bits); `sphere`, minus the sum of squares of their
    distances from 1; `process`, the id of the process that evaluates.
    """

    def __init__(self, **numbers: float) -> None:
        super().__init__(num_samples=2)
        self.numbers = numbers

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        numbers = torch.tensor([float(number) for number in self.numbers.values()], dtype=torch.float64)
        process = torch.tensor(float(os.getpid()), dtype=torch.float64)
        return {"ones": numbers.sum(), "sphere": -((numbers - 1.0) ** 2).sum(), "process": process}
