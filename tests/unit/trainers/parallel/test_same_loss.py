"""A model cut over workers has the loss that it has as a whole, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.parallel.same_loss import loss_of_whole
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import Rows, furthest, stream_of

CUT: dict[str, dict[str, Any]] = {"pipeline": {"pipeline": 2, "split": ["2"]}, "tensor": {"tensor": 2}}


class Noting(nn.Module):
    """A layer that leaves the mean square of its outputs in an attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.tanh(self.layer(x))
        self.penalty = outputs.square().mean()
        return outputs


class Narrowing(nn.Module):
    """A model that leaves in an attribute the mean of what plans split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.square().mean()
        return torch.as_tensor(self.last(hidden))


class Penalised(Rows):
    """A task whose loss has a part that the model does not return: that of the layer `noting`."""

    def __init__(self, noting: int | None) -> None:
        rng = np.random.default_rng(0)
        super().__init__(rng.normal(size=(24, 4)), rng.integers(0, 2, size=24), self._build)
        self.noting = noting
        self.model = nn.Module()

    def _build(self) -> nn.Module:
        layers = [nn.Linear(4, 4), Noting(4), nn.Linear(4, 4), Noting(4)]
        self.model = Narrowing() if self.noting is None else nn.Sequential(*layers)
        return self.model

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        layer: Any = self.model if self.noting is None else self.model.get_submodule(str(self.noting))
        return super().loss(outputs, batch) + layer.penalty


class Random(Rows):
    """A task whose loss draws random numbers."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs + torch.randn(()), batch)


def trained(noting: int | None, network: dict[str, Any]) -> LaidOut:
    return train_laid_out(lambda: Penalised(noting), layout_settings(network, batch_size=12, steps=2))


@pytest.mark.parametrize(("noting", "cut"), [(1, "pipeline"), (None, "tensor")])
def test_a_loss_that_needs_what_another_worker_has_is_refused(noting: int | None, cut: str) -> None:
    with pytest.raises(ConfigError, match=r"with the model cut over workers\. The task's loss uses more than the"):
        trained(noting, CUT[cut])


@pytest.mark.parametrize(("noting", "cut"), [(3, "pipeline"), (1, "tensor"), (3, "tensor")])
def test_a_loss_that_needs_what_its_worker_has_is_that_of_one_process(noting: int, cut: str) -> None:
    one, found = trained(noting, {}), trained(noting, CUT[cut])
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("cut", CUT)
def test_a_loss_that_is_random_is_not_compared(cut: str) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 4)), rng.normal(size=24)
    task = Random(inputs, targets, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    assert len(train_laid_out(lambda: task, layout_settings(CUT[cut], batch_size=12, steps=2)).losses) == 2


@pytest.mark.parametrize("cut", CUT)
def test_the_loss_is_compared_once_and_not_again_when_the_workers_meet_again(
    cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, compared = layout_settings(CUT[cut], batch_size=12), []
    replicas = [Replica(task, settings, stream_of(task, settings)) for task in (Penalised(3), Penalised(3))]

    def noted(*given: Any) -> float | None:
        compared.append(given)
        return loss_of_whole(*given)

    monkeypatch.setattr("orchestray.trainers.parallel.assemble.loss_of_whole", noted)
    for _ in range(2):
        run_replicas(2, lambda world: replicas[world.rank].connect(world))
    assert len(compared) == 2
