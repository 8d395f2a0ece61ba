"""Embeddings with sparse gradients: what plain PyTorch trains, any number of workers trains alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.optimizers import Optimizer
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import furthest

STEPS, ROWS = 4, 30
WHOLE: dict[str, Any] = {"microbatches": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"network": WHOLE},
    "one, accumulate 2": {"network": WHOLE, "accumulate": 2},
    "data 3": {"network": {"data": 3, **WHOLE}},
    "ZeRO-2": {"network": {"data": 2, **WHOLE}, "exchange": {"shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2, **WHOLE}, "exchange": {"shard": "parameters"}},
    "pipeline 2": {"network": {"pipeline": 2}},
    "ring": {"network": {"data": 2, **WHOLE}, "exchange": {"algorithm": "ring"}},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}
"""Optimizers; plain PyTorch takes sparse gradients in the first three."""
SECTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "sgd", "lr": 0.1},
    "adagrad": {"type": "adagrad", "lr": 0.1},
    "momentum": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
    "adam": {"type": "adam", "lr": 0.1},
}


class Tables(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.used = nn.Embedding(ROWS, 4, sparse=sparse)
        self.unused = nn.Embedding(ROWS, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.used(ids[:, 0]) + self.bag(ids))
        return found[:, 0]


class Recommend:
    def __init__(self, sparse: bool = True) -> None:
        self.sparse = sparse

    def build_model(self) -> nn.Module:
        return Tables(self.sparse)

    def dataset(self, split: str) -> pa.Table:
        ids = np.random.default_rng(len(split)).integers(0, ROWS, (50, 2))
        return pa.table({"ids": pa.array(list(ids)), "targets": np.sin(ids.sum(1))})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["ids"]), "targets": to_tensor(columns["targets"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["targets"]).square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def trained(*, network: Any = None, exchange: Any = None, **train: Any) -> LaidOut:
    return train_laid_out(Recommend, layout_settings(network, exchange, batch_size=8, steps=STEPS, **train))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_sparse_gradients_train_as_in_plain_pytorch(optimizer: str, layout: str) -> None:
    right = train_plainly(Recommend(), OPTIMIZERS[optimizer], batch_size=8, steps=STEPS)
    found = trained(optimizer=SECTIONS[optimizer], **LAYOUTS[layout])
    assert furthest(found.weights, right.weights) <= 1e-12


# What plain PyTorch does not do with sparse gradients is what it does with the same gradients in full.
@pytest.mark.parametrize("layout", ["one", "data 3", "ZeRO-2"])
@pytest.mark.parametrize(("optimizer", "clip"), [("momentum", None), ("adam", None), ("sgd", 0.1), ("adagrad", 0.1)])
def test_other_optimizers_and_clipping_see_all_of_a_sparse_gradient(
    optimizer: str, clip: float | None, layout: str
) -> None:
    dense = Recommend(sparse=False)
    right = train_plainly(dense, OPTIMIZERS[optimizer], batch_size=8, steps=STEPS, grad_clip=clip)
    found = trained(optimizer=SECTIONS[optimizer], grad_clip=clip, **LAYOUTS[layout])
    unused = {name: value for name, value in found.weights.items() if "unused" not in name}
    assert furthest(unused, {name: right.weights[name] for name in unused}) <= 1e-12


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_only_the_rows_of_a_sparse_gradient_are_touched(name: str) -> None:
    optimizer: Optimizer = make_optimizer(type=name)
    table = torch.zeros(1000, 3)
    optimizer.init([("table", table)])
    rows = torch.tensor([[7, 3, 7]])
    gradient = torch.sparse_coo_tensor(rows, torch.ones(3, 3), (1000, 3))
    with torch.profiler.profile(profile_memory=True) as profiled:
        optimizer.step([table], [gradient], 0.1)
    assert table.nonzero()[:, 0].unique().tolist() == [3, 7]
    largest = max(event.self_cpu_memory_usage for event in profiled.key_averages())
    assert largest < table.nbytes
