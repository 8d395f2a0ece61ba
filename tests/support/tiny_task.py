"""A task small enough to train many times in a test, with everything that makes exactness hard."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor


class TinyTask:
    """Two classes of points, 37 samples: no batch size divides it."""

    def __init__(self, batch_norm: bool = False, dropout: float = 0.0, num_samples: int = 37, nan_at: int = -1) -> None:
        self.batch_norm = batch_norm
        self.dropout = dropout
        self.num_samples = num_samples
        self.nan_at = nan_at

    def build_model(self) -> nn.Module:
        middle: list[nn.Module] = [nn.BatchNorm1d(8)] if self.batch_norm else []
        if self.dropout:
            middle.append(nn.Dropout(self.dropout))
        return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 2))

    def dataset(self, split: str) -> pa.Table:
        generator = np.random.default_rng(1 if split == "train" else 2)
        points = generator.normal(size=(self.num_samples, 4)).astype(np.float32)
        labels = (points.sum(axis=1) > 0).astype(np.int64)
        if split == "train" and self.nan_at >= 0:
            points[self.nan_at, 1] = np.nan
        column = pa.FixedSizeListArray.from_arrays(pa.array(points.reshape(-1)), 4)
        return pa.table({"point": column, "label": labels})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["point"]), "targets": to_tensor(columns["label"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).to(torch.float64).mean()}
