"""The way from a config's plan to a split model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import TrainingError
from support.layouts import held_elements, layout_settings, train_laid_out
from support.training import Rows, furthest

SHORT = {"precision": "bfloat16"}


class Casting(nn.Module):
    """A model that works under autocast alone: its layers hold float32 and are given bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs.bfloat16()).tanh())


class TakingTurns(Casting):
    """A model that leaves another one of two layers out in each pass that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 32)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        layer = self.other if self.passes % 2 else self.first
        return self.last(layer(inputs).tanh())


def rows(model: type[nn.Module] = Casting) -> Rows:
    rng = np.random.default_rng(0)
    return Rows(rng.normal(size=(48, 6)), rng.integers(0, 5, size=48), model)


def test_a_model_that_works_in_the_precision_of_the_run_alone_is_split() -> None:
    alone = train_laid_out(rows, layout_settings({"microbatches": None}, **SHORT))
    settings = layout_settings({"microbatches": None, "tensor": 2}, **SHORT)
    assert furthest(train_laid_out(rows, settings).weights, alone.weights) < 5e-3
    whole, held = held_elements(rows, settings)
    assert all(number < whole for number in held)
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_that_goes_another_way_than_it_was_split_by_is_told_so_at_its_own_line() -> None:
    with pytest.raises(TrainingError, match=r"\(.*test_assemble\.py, line \d+\)\. Layers are split .*\.tensor to 1"):
        train_laid_out(lambda: rows(TakingTurns), layout_settings({"microbatches": None, "tensor": 2}))
