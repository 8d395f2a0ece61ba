"""The way from a config's plan to a split model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

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


def rows() -> Rows:
    rng = np.random.default_rng(0)
    return Rows(rng.normal(size=(48, 6)), rng.integers(0, 5, size=48), Casting)


def test_a_model_that_works_in_the_precision_of_the_run_alone_is_split() -> None:
    alone = train_laid_out(rows, layout_settings({"microbatches": None}, **SHORT))
    settings = layout_settings({"microbatches": None, "tensor": 2}, **SHORT)
    assert furthest(train_laid_out(rows, settings).weights, alone.weights) < 5e-3
    whole, held = held_elements(rows, settings)
    assert all(number < whole for number in held)
    assert not torch.is_autocast_enabled("cpu")
