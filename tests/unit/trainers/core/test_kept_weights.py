"""Training that keeps zeros, or weights of equal value, through the run's own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.platform.run.model_files import save_model
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.kept_weights import Kept, keep
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.saved.initial_weights import with_initial_weights
from orchestray.trainers.shrink.deep_compression import pruned, with_shared_values
from support.layouts import train_laid_out
from support.training import few_digits, same_bits, settings_for

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01},
    {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
]


def start(folder: Path, what: Kept) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found: dict[str, Tensor] = dict(few_digits(hidden=[16]).build_model().double().state_dict())
    names = [name for name in found if name.endswith("weight")]
    found = pruned(found, names, 0.6)
    if what == "values":
        found = with_shared_values(found, names, 3)
    save_model(folder, found, {})
    return found


def trained(folder: Path, what: Kept | None, *, data: int = 1, shard: str = "none", **train: Any) -> dict[str, Tensor]:
    more = {} if what is None else {"init_keeps": what}
    train = {"precision": "float64", "steps": 8, **train, **more}
    settings = settings_for(data, {"shard": shard}, **train, init_from=str(folder))
    return train_laid_out(task_of(settings), settings).weights


def task_of(settings: ReplicaSettings) -> Callable[[], Any]:
    return lambda: with_initial_weights(few_digits(hidden=[16]), settings.initial)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: str(each["type"]))
def test_zeros_stay_zero_and_all_else_moves(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    before = start(tmp_path / "model", "zeros")
    after = trained(tmp_path / "model", "zeros", optimizer=optimizer)
    for name in ("0.weight", "2.weight"):
        assert torch.equal(after[name] == 0, before[name] == 0)
    # Some pixels are always black, and their weights have no gradients.
    assert (after["2.weight"] != before["2.weight"]).sum() == (before["2.weight"] != 0).sum()
    assert not torch.equal(after["0.bias"], before["0.bias"])
    free = trained(tmp_path / "model", None, optimizer=optimizer)
    assert int((free["2.weight"] == 0).sum()) < int((before["2.weight"] == 0).sum()) / 10  # those of units that are off


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: str(each["type"]))
def test_weights_of_a_value_move_together(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    before = start(tmp_path / "model", "values")
    after = trained(tmp_path / "model", "values", optimizer=optimizer)
    for name in ("0.weight", "2.weight"):
        for value in torch.unique(before[name]):
            members = after[name][before[name] == value]
            assert float(members.max() - members.min()) < 1e-14
            assert (float(value) == 0) == (float(members[0]) == 0)
    assert 5 <= len(torch.unique(before["2.weight"])) <= 9
    assert not torch.equal(after["2.weight"], before["2.weight"])


@pytest.mark.parametrize("shard", ["none", "gradients"])
@pytest.mark.parametrize("what", ["zeros", "values"])
def test_two_workers_keep_what_one_keeps(tmp_path: Path, what: Kept, shard: str) -> None:
    before = start(tmp_path / "model", what)
    one = trained(tmp_path / "model", what, optimizer=OPTIMIZERS[0])
    two = trained(tmp_path / "model", what, data=2, shard=shard, optimizer=OPTIMIZERS[0])
    assert all(float((two[name] - each).abs().max()) < 1e-12 for name, each in one.items())
    assert all(torch.equal(two[name] == 0, before[name] == 0) for name in ("0.weight", "2.weight"))


@pytest.mark.parametrize("what", ["zeros", "values"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, what: Kept) -> None:
    start(tmp_path / "model", what)
    train = {"steps": 8, "optimizer": OPTIMIZERS[1], "init_from": str(tmp_path / "model"), "init_keeps": what}
    settings = settings_for(2, **train)
    whole = train_laid_out(task_of(settings), settings)
    saved = str(tmp_path / "saved")
    paused = replace(settings, pause_at=4)
    train_laid_out(task_of(settings), paused, checkpoints=lambda: CheckpointWriter(saved, keep=1))
    found, _ = latest_good(saved)
    assert found is not None
    again = train_laid_out(task_of(settings), settings, load=lambda: Loaded(found))
    assert same_bits(again.weights, whole.weights)


def test_the_gradient_of_a_shared_value_is_the_sum_of_its_weights() -> None:
    table = torch.tensor([0.0, -0.5, 0.25, 1.0], dtype=torch.float64)
    codes = torch.randint(0, 4, (5, 7), generator=torch.Generator().manual_seed(0))
    x, target = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    layer = nn.Linear(7, 5, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(table[codes])
    keep(layer, "values")
    functional.mse_loss(layer(x), target).backward()  # type: ignore[no-untyped-call]
    values = table.clone().requires_grad_()
    functional.mse_loss(functional.linear(x, values[codes]), target).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert layer.weight.grad is not None
    wanted = values.grad * (table != 0)
    assert torch.allclose(layer.weight.grad, wanted[codes], rtol=0, atol=1e-15)


@pytest.mark.parametrize("what", ["zeros", "values"])
def test_sparse_gradients_are_those_of_dense_ones(what: Kept) -> None:
    table = torch.tensor([0.0, -0.5, 0.25])[torch.randint(0, 3, (6, 4), generator=torch.Generator().manual_seed(0))]
    gradients = []
    for is_sparse in (True, False):
        layer = nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=is_sparse)
        keep(layer, what)
        (layer(torch.tensor([1, 4, 1])) * torch.arange(4.0)).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_sparse == is_sparse
        gradients.append(layer.weight.grad.to_dense())
    assert torch.equal(*gradients)
    assert bool((gradients[0][table == 0] == 0).all())
