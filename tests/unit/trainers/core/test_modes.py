"""Modules that a user has put into evaluation mode stay in it, wherever and however a model is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.modes import begin_training, evaluating
from support.layouts import layout_settings, train_laid_out
from support.stateful import fine_tuning, trained
from support.training import State, furthest, order_of


class Merging(nn.Linear):
    """A layer that adds its update to its weight where it is put into evaluation mode, as LoRA does."""

    is_merged = False

    def train(self, mode: bool = True) -> Merging:
        if self.is_merged is mode:
            self.weight.data.add_(-1.0 if mode else 1.0)
            self.is_merged = not mode
        return super().train(mode)


class Freezing(nn.Sequential):
    """A model that keeps its second layer in evaluation mode by a method of its own."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self[1].eval()
        return self


def plain(steps: int, *, accumulate: int = 1) -> State:
    """Train as a plain loop does that touches no mode, in one process; without the sums of later epochs."""
    rows = fine_tuning()
    torch.manual_seed(0)
    model = rows.build_model().double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    batch = rows.to_batch(rows.table)
    order = torch.from_numpy(order_of(60, seed=0, epoch=0))
    for step in range(steps):
        chosen = order[step * 12 : step * 12 + 12]
        optimizer.zero_grad()
        for part in chosen.chunk(accumulate):
            outputs = model(batch["inputs"][part])
            (rows.loss(outputs, {"targets": batch["targets"][part]}) * len(part) / len(chosen)).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def settings(network: Any = None, exchange: Any = None, **train: Any) -> ReplicaSettings:
    return layout_settings(
        {"microbatches": 1, **(network or {})}, exchange, batch_size=12, steps=4, validate_every_steps=2, **train
    )


@pytest.mark.parametrize(
    ("network", "exchange", "train"),
    [
        *(({}, {}, {}), ({"data": 2}, {}, {}), ({"data": 3}, {}, {"average": {"type": "swa", "from_step": 1}})),
        *(({"data": 2}, {"shard": "gradients"}, {}), ({"data": 2}, {"shard": "parameters"}, {})),
        *(({"pipeline": 2}, {}, {}), ({"pipeline": 2, "split": ["2"]}, {}, {}), ({"data": 2, "pipeline": 2}, {}, {})),
        ({"microbatches": 2}, {}, {}),
    ],
)
def test_a_frozen_backbone_in_evaluation_mode_is_trained_under_as_in_a_plain_loop(
    network: Any, exchange: Any, train: Any
) -> None:
    expected = plain(4, accumulate=network.get("microbatches", 1))
    found = train_laid_out(fine_tuning, settings(network, exchange, **train)).weights
    if not train:  # an average of the weights is another model
        assert furthest(found, expected) <= 1e-12
    fresh = plain(0)
    assert all(torch.equal(found[name], fresh[name]) for name in fresh if name.startswith("0."))


def test_validation_puts_each_module_back_into_its_mode() -> None:
    (replica,) = trained(fine_tuning(), settings())
    modes = {name: module.training for name, module in replica.model.named_modules()}
    assert {name for name, mode in modes.items() if not mode} == {n for n in modes if n == "0" or n.startswith("0.")}


def test_a_model_that_is_given_in_evaluation_mode_stays_in_it() -> None:
    rows = fine_tuning()
    rows._model = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    (replica,) = trained(rows, settings())
    assert not any(module.training for module in replica.model.modules())
    assert torch.equal(replica.model.state_dict()["1.running_mean"], torch.zeros(8, dtype=torch.float64))
    events = [line for line in replica.recorder.since(-1) if line.get("event") == "warning"]
    assert "build_model returned the model in evaluation mode" in events[0]["text"]


def test_a_method_train_of_the_users_decides() -> None:
    model = begin_training(Freezing(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert [module.training for module in model.modules()] == [True, True, False]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_module_is_told_when_a_validation_begins_and_ends() -> None:
    model = nn.Sequential(Merging(2, 2), Merging(2, 2).eval())
    with evaluating(begin_training(model)):
        assert [layer.is_merged for layer in model] == [True, True]
    assert [layer.is_merged for layer in model] == [False, False]
    assert [layer.training for layer in model] == [True, False]


def test_modes_are_put_back_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(ValueError, match="no"), evaluating(model):
        raise ValueError("no")
    assert [module.training for module in model.modules()] == [True, True, False]
