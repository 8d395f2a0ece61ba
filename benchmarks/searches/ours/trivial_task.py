"""The least a trial can be: one parameter, one step, a score that follows from what was searched."""

from __future__ import annotations

import pyarrow as pa
import torch
from torch import Tensor, nn


class Trivial:
    """A task whose score is -(x - 1)^2."""

    def __init__(self, x: float = 0.0) -> None:
        self._x = x

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> pa.Table:
        return pa.table({"value": pa.array([0.0, 1.0], pa.float32())})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": torch.tensor(columns["value"].to_numpy()).reshape(-1, 1)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"score": torch.tensor(-((self._x - 1.0) ** 2), dtype=torch.float64)}
