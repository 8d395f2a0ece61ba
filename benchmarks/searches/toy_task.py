"""The toy of Jaderberg et al. 2017, figure 2, as any user's task file: `benchmarks/searches/toy_task.py:Toy`."""

from __future__ import annotations

import pyarrow as pa
import torch
from torch import Tensor, nn


class Surface(nn.Module):
    """Model of two parameters, 0.9 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((2,), 0.9))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.theta.expand(len(inputs), 2)


class Toy:
    """A task where plain SGD goes up 1.2 - (h_a a^2 + h_b b^2); what counts is 1.2 - (a^2 + b^2)."""

    def __init__(self, h_a: float = 0.5, h_b: float = 0.5) -> None:
        self.h = torch.tensor([h_a, h_b])

    def build_model(self) -> nn.Module:
        return Surface()

    def dataset(self, split: str) -> pa.Table:
        return pa.table({"one": [1.0]})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": torch.ones(columns.num_rows, 1)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (self.h * outputs.square()).sum(1).mean() - 1.2

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"q": 1.2 - outputs.square().sum(1).mean()}
