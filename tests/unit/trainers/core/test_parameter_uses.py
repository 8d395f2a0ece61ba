"""Parameters that a model uses past their module: found in a pass, and there for it where they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.core.parameter_uses import is_used_from_outside, noting_uses
from support.layouts import layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import furthest

WORDS, WIDTH = 64, 48
"""Sizes at which each layer is sharded by itself: 24 KB of weights in double precision."""


class Model(nn.Module):
    """A model of words that uses each of its layers in another way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.middle(self.embedding(words))
        assert self.head.weight.shape == self.embedding.weight.shape
        found: Tensor
        match self.how:
            case "tied by hand":
                found = x @ self.embedding.weight.T + self.head.bias
            case "distances":
                found = -torch.cdist(x, self.embedding.weight.detach()) + self.head(x)
            case "another method":
                found = self.head.forward(x)
            case _:
                found = self.head(x)
        return found


class Words:
    def __init__(self, how: str) -> None:
        self.how = how

    def build_model(self) -> nn.Module:
        return Model(self.how)

    def dataset(self, split: str) -> pa.Table:
        words = np.random.default_rng(0).integers(WORDS, size=(2, 96))
        return pa.table({"word": words[0], "next": words[1]})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["word"]), "targets": to_tensor(columns["next"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {}


USED = {
    "as they are": set(),
    "tied by hand": {"embedding", "head"},
    "distances": {"embedding"},
    "another method": {"head"},
}
"""Names of the modules that are used from outside."""


def marked(model: nn.Module, call: Callable[[], object]) -> set[str]:
    with noting_uses(model):
        call()
    return {name for name, module in model.named_modules() if is_used_from_outside(module)}


@pytest.mark.parametrize("how", USED)
def test_modules_whose_parameters_are_used_while_they_are_not_called_are_found(how: str) -> None:
    model = Model(how)
    assert marked(model, lambda: model(torch.arange(5))) == USED[how]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_that_uses_the_parameters_of_those_in_it_is_not_used_from_outside() -> None:
    attention = nn.MultiheadAttention(8, 2)  # the weights of its last layer are used without a call of that
    x = torch.rand(3, 1, 8)
    assert marked(attention, lambda: attention(x, x, x)) == {"out_proj"}


@pytest.mark.parametrize("how", USED)
def test_a_model_whose_parameters_are_sharded_learns_what_it_would_in_a_single_process(how: str) -> None:
    settings = layout_settings({"data": 2, "microbatches": None}, {"shard": "parameters"})
    found = train_laid_out(lambda: Words(how), settings)
    right = train_plainly(Words(how), steps=3)
    assert found.losses == pytest.approx(right.losses, rel=1e-12)
    assert furthest(found.weights, right.weights) < 1e-12
