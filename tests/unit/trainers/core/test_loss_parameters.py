"""A loss with parameters of its own, which no optimizer moves, is refused by their name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.wrapped_task import WrappedTask
from support.layouts import layout_settings, train_laid_out
from support.training import Rows

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({"microbatches": None}, {}),
    "data": ({"data": 2}, {}),
    "zero3": ({"data": 2}, {"shard": "parameters"}),
    "pipeline": ({"pipeline": 2}, {}),
}


class Centres(Rows):
    """A task whose loss learns a centre for each class, and knows the model as well."""

    def __init__(self, *, is_trained: bool = True) -> None:
        rng = np.random.default_rng(0)
        super().__init__(rng.normal(size=(24, 4)), rng.integers(0, 2, size=24), self._build)
        self.heads = [nn.Linear(3, 2).double().requires_grad_(is_trained)]

    def _build(self) -> nn.Module:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        return self.model

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(self.heads[0](outputs), batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_a_loss_that_nothing_would_move_are_refused_by_name(layout: str) -> None:
    network, exchange = LAYOUTS[layout]
    settings = layout_settings(network, exchange, batch_size=12, steps=1)
    with pytest.raises(
        TrainingError, match=r"loss has the parameter 'heads\.0\.weight' of its own, which the training"
    ):
        train_laid_out(Centres, settings)
    assert len(train_laid_out(lambda: Centres(is_trained=False), settings).losses) == 1


def test_parameters_of_a_task_that_is_wrapped_are_found() -> None:
    settings = layout_settings({"microbatches": None}, batch_size=12, steps=1)
    with pytest.raises(TrainingError, match=r"loss has the parameter 'heads\.0\.weight' of its own"):
        train_laid_out(lambda: WrappedTask(Centres()), settings)
