"""Modules that draw random numbers nobody has seeded are found, and nothing is changed by looking."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.core.rng import RngKey, draws, seed_modules
from orchestray.trainers.core.unseeded_rng import repeated_draws, repeated_warning, unseeded_modules, unseeded_warning
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.python_source import PythonSource
from orchestray.trainers.tasks.transformer import Block

WIDTH = 6


class Functional(nn.Module):
    """A module that drops by a function, before its layer or after."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.linear(functional.dropout(x, 0.5, self.training))
        return functional.dropout(self.linear(x), 0.5, self.training)


class Told(Functional):
    """A module that says that it draws, and calls a module that is seeded in between."""

    draws_random = True

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) * self.dropout(super().forward(x)) + torch.rand_like(x)


class Skipping(nn.Module):
    """A module that skips a layer at times, by a generator that is not torch's (Huang et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


class Numpy(nn.Module):
    draws_random = True

    def forward(self, x: Tensor) -> Tensor:
        return x * np.random.normal()  # noqa: NPY002


class Attending(nn.Module):
    """Attention whose weights are dropped inside torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.randn_like(x)


def inputs() -> Tensor:
    return torch.randn(4, WIDTH)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), Functional(), nn.Dropout(0.5), Functional(first=True)), ["1", "3"]),
        (nn.Sequential(nn.Dropout(0.5), nn.Sequential(Functional(), Told()), Told()), ["1.0"]),
        (nn.Sequential(Attending(), nn.ReLU(), nn.Sequential(Attending())), ["0", "2.0"]),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Skipping()), nn.Tanh()), ["1.0"]),
        (nn.Sequential(Told(), Numpy()), ["1"]),
        (Root(), [""]),
        (nn.Sequential(Told(), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), nn.RReLU()), []),
    ],
    ids=["several", "nested", "attention", "skipping", "numpy", "root", "none"],
)
def test_modules_that_draw_by_themselves_are_found_and_no_others(model: nn.Module, wanted: list[str]) -> None:
    assert unseeded_modules(model, inputs()) == wanted


def test_looking_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Functional(), nn.Dropout(0.5), Skipping(), Numpy())
    x = inputs()
    kept = x.clone()
    model.eval()
    model[1].train()
    modes = [module.training for module in model.modules()]
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert unseeded_modules(model, x) == ["1", "3", "4"]
    assert torch.equal(x, kept)
    assert [module.training for module in model.modules()] == modes
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_maps_its_layers_over_the_samples_is_looked_at_like_others() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.noise = nn.Linear(WIDTH, WIDTH), Functional()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.noise(torch.vmap(self.layer)(x))
            return y

    assert unseeded_modules(Mapped(), inputs()) == ["noise"]


def test_an_error_of_the_model_comes_through_and_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH + 1, 1)).eval()
    mean = model[0].running_mean
    with pytest.raises(RuntimeError, match="shapes"):
        unseeded_modules(model, inputs())
    assert model[0].running_mean is mean
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_the_warning_names_the_modules_and_says_what_to_do() -> None:
    model = nn.Sequential(Functional(), Functional())
    text = unseeded_warning(model, ["1"])
    assert text.startswith(
        "Module '1' (Functional) draws random numbers of its own, so the results depend on the layout"
    )
    assert "draws_random = True" in text
    assert unseeded_warning(model, ["0", "1"]).startswith("Modules '0' (Functional), '1' (Functional) draw random")
    assert unseeded_warning(Root(), [""]).startswith("Module the model itself (Root) draws")
    assert unseeded_warning(model, []) == ""


def test_a_dropout_used_in_several_places_is_found_since_it_drops_the_same_units() -> None:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared, nn.Dropout(0.5))
    seed_modules(model, RngKey(), torch.device("cpu"))
    ones = torch.ones(4, WIDTH)
    assert torch.equal(shared(ones), shared(ones))
    assert repeated_draws(model, ones) == ["1"]
    assert repeated_warning(["1"]).startswith("Module '1' is called several times")
    assert repeated_warning(["1", "2"]).startswith("Modules '1', '2' are called several times")
    assert repeated_draws(model[2:3], ones) == []
    assert repeated_warning([]) == ""


@pytest.mark.parametrize("model", ["mlp", "cnn", "inception", "alexnet"])
def test_the_digits_models_are_seeded_throughout(model: str) -> None:
    task = Digits(model=model, dropout=0.3, hidden=[8, 8])
    assert unseeded_modules(task.build_model(), torch.stack([task.example_inputs()] * 2)) == []


def test_the_transformer_is_seeded_throughout_and_each_dropout_is_called_once() -> None:
    task = PythonSource(context=8, width=16, depth=2, heads=2, dropout=0.3)
    model = task.build_model()
    calls: list[nn.Module] = []
    for module in model.modules():
        if draws(module):
            module.register_forward_hook(lambda called, _inputs, _output: calls.append(called))
    batch = torch.stack([task.example_inputs()] * 2)
    model(batch)
    assert len(calls) == len(set(calls)) == 1 + 2 * 3
    assert unseeded_modules(model, batch) == []


def test_the_blocks_attention_is_torchs_but_for_what_is_dropped() -> None:
    torch.manual_seed(0)
    block = Block(16, 4, 0.5).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    wanted = block.eval()(x)
    block.attention_dropout.p = 1e-300  # drops nothing, but goes the way of what drops
    block.attention_output_dropout.p = block.feed_forward_dropout.p = 0.0
    torch.testing.assert_close(block.train()(x), wanted, atol=1e-12, rtol=1e-12)
