"""Sparse gradients under workers that change the same memory without a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.variants.hogwild.hogwild import Updater
from support.hogwild_runs import hogwild_run
from support.layouts import layout_settings, train_laid_out
from support.training import Rows, furthest

# -- sparse gradients --------------------------------------------------------------------------------------------------


def sparse_gradient(rows: list[int], width: int, num_rows: int, seed: int = 0) -> Tensor:
    values = torch.randn(len(rows), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (num_rows, width), check_invariants=True)


def updater(parameters: list[Tensor], optimizer: dict[str, Any] | None = None, **options: Any) -> Updater:
    rule = make_optimizer(**(optimizer or {"type": "sgd"}))
    rule.init((str(index), parameter) for index, parameter in enumerate(parameters))
    return Updater(parameters, rule, **{"by_rows": optimizer is None, "grad_clip": None, **options})


def test_a_sparse_update_touches_its_rows_alone_and_adds_up_rows_that_come_twice() -> None:
    # Whole numbers and a rate that is a power of two: nothing is rounded, whatever is added up first.
    table = torch.arange(30, dtype=torch.float64).view(10, 3)
    untouched = [row for row in range(10) if row not in (2, 5, 7)]
    expected = table.clone()
    gradient = sparse_gradient([7, 2, 7, 5], 3, 10)
    values = (8 * gradient._values()).round()
    gradient = torch.sparse_coo_tensor(gradient._indices(), values, (10, 3), check_invariants=True)
    expected.add_(gradient, alpha=-0.125)
    # Were other rows written, even with what they held, NaN would not be where it was put.
    table[untouched] = float("nan")
    writes = WritesTo(table)
    updater([table]).apply([gradient], 0.125)
    assert torch.equal(table[[2, 5, 7]], expected[[2, 5, 7]])
    assert writes.rows() == {2, 5, 7}


class WritesTo:
    """Rows of a table that have changed."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._before = table, table.clone().view(torch.int64)

    def rows(self) -> set[int]:
        changed = (self._table.view(torch.int64) != self._before).any(dim=1)
        return set(changed.nonzero().flatten().tolist())


def test_rows_that_others_change_while_a_sparse_update_is_made_keep_what_they_got() -> None:
    table, reference = torch.zeros(8, 2, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)
    mine, theirs = sparse_gradient([1, 3], 2, 8, seed=1), sparse_gradient([3, 6], 2, 8, seed=2)
    for gradient in (mine, theirs):
        reference.add_(gradient, alpha=-1.0)
        updater([table]).apply([gradient], 1.0)
    assert torch.equal(table, reference)


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}], ids=str)
def test_under_a_rule_with_state_a_sparse_gradient_moves_as_the_dense_one(optimizer: dict[str, Any]) -> None:
    tables = [torch.ones(6, 2, dtype=torch.float64) for _ in range(2)]
    sparse, dense = (updater([table], optimizer) for table in tables)
    for seed in range(3):
        gradient = sparse_gradient([seed, 4], 2, 6, seed)
        sparse.apply([gradient], 0.1)
        dense.apply([gradient.to_dense()], 0.1)
    assert torch.equal(*tables)


def test_sparse_and_dense_gradients_are_clipped_by_their_joint_norm() -> None:
    table, other = torch.zeros(5, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    gradient, beside = sparse_gradient([0, 3, 0], 2, 5), torch.full((3,), 2.0, dtype=torch.float64)
    whole = torch.cat([gradient.to_dense().reshape(-1), beside])
    scale = 0.5 / (float(whole.norm()) + 1e-6)
    updater([table, other], grad_clip=1.0).apply([gradient, beside.clone()], 1.0, weight=0.5)
    assert torch.allclose(torch.cat([table.reshape(-1), other]), -whole * scale, rtol=0, atol=1e-12)


class Words(Rows):
    """A task that sorts short texts by the mean of the words' vectors, of which a text has a few."""

    def __init__(self, sparse: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(0, 50, (240, 4), generator=generator)
        targets = (words < 25).sum(1) > 2

        def model() -> nn.Module:
            return nn.Sequential(nn.EmbeddingBag(50, 6, sparse=sparse), nn.Linear(6, 2))

        super().__init__(words.double().numpy(), targets.long().numpy(), model)

    def to_batch(self, columns: Any) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return {**batch, "inputs": batch["inputs"].long()}


@pytest.mark.parametrize("train", [{}, {"grad_clip": 0.1}], ids=str)
def test_one_worker_with_sparse_gradients_is_the_single_process_with_dense_ones(
    train: dict[str, Any], tmp_path: Path
) -> None:
    chosen = {"steps": 25, "optimizer": {"type": "sgd", "lr": 2.0}, **train}
    one = train_laid_out(lambda: Words(sparse=False), layout_settings(**chosen))
    assert furthest(hogwild_run(tmp_path, make=Words, **chosen).weights, one.weights) <= 1e-12


def test_two_workers_with_sparse_gradients_learn(tmp_path: Path) -> None:
    found = hogwild_run(tmp_path, 2, make=Words, steps=None, epochs=6, optimizer={"type": "sgd", "lr": 4.0})
    assert found.lines[-1]["accuracy"] > 0.9
