"""Gradients of embeddings travel to the servers as the rows they have, and train as the dense ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import furthest

NUM_WORDS = 300


class Words(nn.Module):
    """A network for the class of three words."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(4))
        self.words = nn.Embedding(NUM_WORDS, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        answer: Tensor = self.out(torch.tanh(self.words(words).mean(1) + self.before))
        return answer


class WordTask:
    def __init__(self, sparse: bool = True) -> None:
        self.sparse = sparse

    def build_model(self) -> nn.Module:
        return Words(self.sparse)

    def dataset(self, split: str) -> pa.Table:
        generator = np.random.default_rng(1 if split == "train" else 2)
        words = generator.integers(0, NUM_WORDS, size=(60, 3))
        column = pa.FixedSizeListArray.from_arrays(pa.array(words.reshape(-1)), 3)
        return pa.table({"words": column, "label": words.sum(axis=1) % 2})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["words"]), "targets": to_tensor(columns["label"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).to(torch.float64).mean()}


OPTIMIZERS = [
    {"type": "sgd", "lr": 0.1},
    {"type": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"type": "adagrad", "lr": 0.1},
    # With a large eps: what divides by the size of a gradient makes much of the last bit of one that is almost zero.
    {"type": "rmsprop", "lr": 0.01, "eps": 1e-3},
    {"type": "adam", "lr": 0.01, "eps": 1e-3},
    {"type": "adamw", "lr": 0.01, "eps": 1e-3},
    {"type": "lars", "lr": 0.1},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one['type']}{len(one)}")
def test_sparse_gradients_at_servers_are_the_single_process_under_every_optimizer(
    optimizer: dict[str, Any], tmp_path: Path
) -> None:
    shards = 1 if optimizer["type"] == "lars" else 2
    chosen: dict[str, Any] = {"steps": 4, "batch_size": 20, "optimizer": optimizer}
    one = train_laid_out(lambda: WordTask(sparse=False), layout_settings(**chosen))
    found = train_central(WordTask, central_settings(2, {"shards": shards}, **chosen), tmp_path)
    assert furthest(found.weights, one.weights) <= 1e-12
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert all(worker["saved_bytes"] > 0 for worker in found.workers)


@pytest.mark.parametrize(
    ("data", "exchange"),
    [
        (1, {"consistency": "asynchronous"}),
        (1, {"consistency": "asynchronous", "push_every": 2}),
        (1, {"consistency": "asynchronous", "rates": "decoupled"}),
        (2, {"consistency": "stale", "staleness": 0}),
        (2, {"groups": 2}),
    ],
    ids=str,
)
def test_sparse_gradients_are_the_dense_ones_however_they_are_pushed(
    data: int, exchange: dict[str, Any], tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {"steps": 4, "batch_size": 20, "optimizer": {"type": "sgd", "lr": 0.1}}
    settings = central_settings(data, exchange, **chosen)
    dense = train_central(lambda: WordTask(sparse=False), settings, tmp_path / "dense")
    sparse = train_central(WordTask, settings, tmp_path / "sparse")
    assert furthest(sparse.weights, dense.weights) <= 1e-12
    assert sparse.losses == pytest.approx(dense.losses, rel=0, abs=1e-12)


def test_a_compressed_sparse_gradient_is_the_compressed_dense_one(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"steps": 4, "batch_size": 20, "optimizer": {"type": "sgd", "lr": 0.1}}
    settings = replace(central_settings(1, **chosen), compression={"type": "topk", "ratio": 0.1})
    found = [train_central(lambda s=s: WordTask(s), settings, tmp_path / str(s)) for s in (False, True)]
    assert furthest(found[0].weights, found[1].weights) <= 1e-12


def gradients(seed: int, sparse: bool) -> FlatModel:
    model = Words(sparse).double()
    flat = FlatModel(model)
    words = torch.randint(0, NUM_WORDS, (5, 3), generator=torch.Generator().manual_seed(seed))
    flat.begin()
    model(words).square().sum().backward()
    return flat


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_the_gradient_and_their_cuts_are_its_parts(seed: int) -> None:
    flat = gradients(seed, sparse=True)
    whole, summed = flat.runs(), flat.runs(flat.gradient)
    assert whole is not None
    assert summed is not None
    for found in (whole, summed):
        assert torch.equal(found.fill(torch.empty_like(flat.values)), flat.gradient)
        assert found.num_bytes < flat.values.nbytes / 3
        parameters = tuple((f"p{index}", (size,)) for index, size in enumerate((4, NUM_WORDS * 4, 10)))
        for num_shards in (1, 2, 7, 40):
            for first, last in Partition(parameters, num_shards).bounds:
                part = RowSparseGradient(*found.cut(first, last).tensors)
                assert bool((part.lengths > 0).all())
                assert torch.equal(part.fill(torch.empty(last - first).double()), flat.gradient[first:last])


def test_a_dense_gradient_and_one_of_nearly_all_rows_are_sent_whole() -> None:
    assert gradients(0, sparse=False).runs() is None
    model = Words(sparse=True).double()
    flat = FlatModel(model)
    flat.begin()
    model(torch.arange(NUM_WORDS)[None]).square().sum().backward()
    assert flat.runs() is None
    assert flat.runs(flat.gradient) is None
