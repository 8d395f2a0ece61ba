"""Models that take gradients themselves: forces in training and validation, penalties through batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.own_gradients import WithoutGradients
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import furthest, order_of

RATE, WHOLE = 0.01, {"microbatches": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"network": WHOLE},
    "data 2": {"network": {"data": 2, **WHOLE}},
    "data 3, accumulate 2": {"network": {"data": 3, **WHOLE}, "accumulate": 2},
    "ZeRO-2": {"network": {"data": 3, **WHOLE}, "exchange": {"shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2, **WHOLE}, "exchange": {"shard": "parameters"}},
}


class Energy(nn.Module):
    """An energy of positions, and the forces: minus its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions.requires_grad_()
        energy = self.net(positions)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy[:, 0], -slope


class Forces:
    def __init__(self, rows: int = 25) -> None:
        self.rows = rows

    def build_model(self) -> nn.Module:
        return Energy()

    def dataset(self, split: str) -> pa.Table:
        positions = np.random.default_rng(len(split)).normal(size=(self.rows, 3))
        return pa.table({"positions": pa.array(list(positions)), "energy": (positions**2).sum(1) / 2})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["positions"]), "energy": to_tensor(columns["energy"])}

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        energy, forces = outputs
        return (energy - batch["energy"]).square().mean() + (forces + batch["inputs"]).square().mean()

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"apart": (outputs[1] + batch["inputs"]).square().mean()}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Tanh()),
            *(nn.Conv1d(4, 5, 1), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(10, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


class Penalty(Forces):
    """A critic with batch normalisation, whose slope by its inputs is held at 1 by the loss."""

    def build_model(self) -> nn.Module:
        return Critic()

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        batch["inputs"].requires_grad_()
        return batch

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), batch["inputs"], create_graph=True)
        return (outputs[:, 0] - batch["energy"]).square().mean() + (slope.norm(dim=1) - 1).square().mean()

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mean": outputs.mean()}


def trained(task: Any, *, network: Any = None, exchange: Any = None, **train: Any) -> LaidOut:
    chosen = {"batch_size": 12, "steps": 6, "optimizer": {"type": "sgd", "lr": RATE}, **train}
    return train_laid_out(lambda: task, layout_settings(network, exchange, **chosen))


def plain(task: Any) -> LaidOut:
    return train_plainly(task, lambda parameters: torch.optim.SGD(parameters, lr=RATE), batch_size=12, steps=6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forces_are_learned_and_validated_as_in_plain_pytorch(layout: str) -> None:
    right = plain(Forces())
    found = trained(Forces(), **LAYOUTS[layout])
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, right.weights) <= 1e-12
    model, batch = Energy().double(), Forces().to_batch(Forces().dataset("validation"))
    model.load_state_dict(right.weights)
    validation = found.outcome.final["validation"]
    outputs = model(batch["inputs"])
    assert validation["apart"] == pytest.approx(Forces().metrics(outputs, batch)["apart"].item(), rel=1e-10)
    assert validation["loss"] == pytest.approx(Forces().loss(outputs, batch).item(), rel=1e-10)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "ZeRO-3"])
def test_a_penalty_of_slopes_through_batch_normalisation_is_that_of_plain_pytorch(layout: str) -> None:
    task = Penalty(rows=26)  # the last batch has two samples, which not every replica shares
    accumulate = LAYOUTS[layout].get("accumulate", 1)
    right = plain(task) if accumulate == 1 else trained(task, network=WHOLE, accumulate=accumulate)
    found = trained(task, **LAYOUTS[layout])
    assert found.losses == pytest.approx(right.losses, rel=1e-10)
    assert furthest(found.weights, right.weights) <= 1e-11


class Picky(Penalty):
    """The same, of which some samples do not count: those of the second of two replicas in the first batch."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.left_out = to_tensor(self.dataset("train")["energy"].take(order_of(rows, seed=0, epoch=0)[6:12]))

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return {**batch, "weights": (~torch.isin(batch["energy"], self.left_out)).double()}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["weights"].sum()

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), batch["inputs"], create_graph=True)
        each = (outputs[:, 0] - batch["energy"]).square() + (slope.norm(dim=1) - 1).square()
        return (batch["weights"] * each).sum() / self.weight(batch)


def test_samples_of_weight_0_take_part_in_a_penalty_of_slopes_through_batch_normalisation() -> None:
    right = plain(Picky(26))
    found = trained(Picky(26), **LAYOUTS["data 2"])
    assert found.losses == pytest.approx(right.losses, rel=1e-10)
    assert furthest(found.weights, right.weights) <= 1e-11


class Wide(Energy):
    """A model whose layers are sharded one by one."""

    def __init__(self) -> None:
        super().__init__()
        middle = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), *middle, nn.Linear(64, 1))


def test_sharded_layers_are_gathered_for_the_gradients_that_a_forward_pass_takes() -> None:
    task = Forces()
    task.build_model = Wide  # type: ignore[method-assign]
    found = trained(task, **LAYOUTS["ZeRO-3"])
    assert furthest(found.weights, plain(task).weights) <= 1e-12


@pytest.mark.parametrize(
    ("task", "layout", "key"),
    [
        (Penalty(), LAYOUTS["ZeRO-3"], "strategy.exchange.shard: the task's loss"),
        (Penalty(), {"network": {"pipeline": 2}}, "strategy.network.pipeline: the task's loss"),
        (Penalty(), {"network": {"tensor": 2}}, "strategy.network.tensor: the task's loss"),
        (Forces(), {"network": {"tensor": 2}}, "strategy.network.tensor: the model's forward"),
        (Forces(), {"network": {"pipeline": 2}}, "cannot be cut into pipeline stages.*it takes gradients"),
    ],
)
def test_layouts_that_would_tear_the_graph_of_a_gradient_are_refused(task: Any, layout: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        trained(task, **layout)


@pytest.mark.parametrize("recompute", ["blocks", "sqrt"])
def test_recomputation_that_the_model_cannot_go_back_through_is_refused(recompute: str) -> None:
    class Deep(Energy):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *blocks, nn.Linear(8, 1))

    task = Forces()
    task.build_model = Deep  # type: ignore[method-assign]
    with pytest.raises((TrainingError, ConfigError), match=r"gradients"):
        trained(task, network=WHOLE, recompute=recompute)


def test_what_takes_no_gradients_is_called_once_and_without_them() -> None:
    calls: list[bool] = []

    def record(given: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return given.add_(1)

    without, given = WithoutGradients(), torch.zeros(2)
    assert [float(without(record, given)[0]) for _ in range(2)] == [1.0, 1.0], "the first call changes a copy"
    assert calls == [False, False]


def test_what_takes_gradients_is_called_again_with_them_on_what_it_was_given() -> None:
    calls: list[bool] = []

    def slope(given: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        moved = given.add_(1).detach().requires_grad_()
        (found,) = torch.autograd.grad(moved.square().sum(), moved)
        return found

    without, given = WithoutGradients(), torch.zeros(2)
    with torch.no_grad():
        assert [float(without(slope, given)[0]) for _ in range(2)] == [2.0, 4.0]
    assert calls == [False, True, True]
    with pytest.raises(RuntimeError, match="something else"):
        WithoutGradients()(lambda _: (_ for _ in ()).throw(RuntimeError("something else")), given)


def test_a_call_that_is_made_again_changes_buffers_once() -> None:
    norm = nn.BatchNorm1d(3, momentum=None)
    norm.register_buffer("calls", torch.zeros(()))

    def forward(x: Tensor) -> Tensor:
        norm.calls = norm.calls + 1
        norm(x)
        moved = x.detach().requires_grad_()
        return torch.autograd.grad(moved.square().sum(), moved)[0]

    without = WithoutGradients(norm)
    for _ in range(2):
        without(forward, torch.rand(4, 3))
    assert (norm.calls.item(), norm.num_batches_tracked.item()) == (2, 2)  # type: ignore[operator]
