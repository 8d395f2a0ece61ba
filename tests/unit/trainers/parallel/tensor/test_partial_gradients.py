"""Gradients of parameters that stay whole where layers are split: whole, a part on each worker, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.verify import nothing_hidden
from support.layouts import layout_settings, train_laid_out
from support.split_models import build
from support.threads import run_replicas
from support.training import Rows, furthest


class Scaled(nn.Module):
    """A learnt scale of what is split; a learnt shift of what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.3]))
        self.shift = nn.Parameter(torch.tensor([0.2]))
        self.wide = nn.Linear(6, 8)
        self.narrow = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.scale * torch.tanh(self.wide(x))) + self.shift
        return y


class Attention(nn.Module):
    """An attention whose scores have a learnt temperature, as in cosine attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(3, 24)
        self.out = nn.Linear(8, 5)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unflatten(-1, (2, 3))).unflatten(-1, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * self.temperature).softmax(-1)
        y: Tensor = self.out((scores @ v).transpose(1, 2).flatten(-2)).mean(1)
        return y


class Torn(Scaled):
    """A model whose scale is used on what is split and on what is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Gated(nn.Module):
    """A block that begins as nothing (Bachlechner et al., "ReZero", 2020), with a learnt scale inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.wide = nn.Linear(6, 16)
        self.narrow = nn.Linear(16, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5)

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(x + self.gate * self.narrow(self.inside(self.wide(x)))))
        return y


class Hidden(Gated):
    """A block that cannot be split between its layers, which a gate of zero hides."""

    def inside(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Planned(Rows):
    def tensor_plan(self, _model: nn.Module) -> dict[str, str]:
        return {"wide": "output", "narrow": "input"}


def rows(model: type[nn.Module], kind: type[Rows] = Rows) -> Rows:
    rng = np.random.default_rng(0)
    return kind(rng.normal(size=(72, 6)), rng.integers(0, 5, size=72), model)


@pytest.mark.parametrize("model", [Scaled, Attention, Torn, Gated, Hidden])
def test_a_whole_parameter_of_what_is_split_gets_its_whole_gradient(model: type[nn.Module]) -> None:
    plain = train_laid_out(lambda: rows(model), layout_settings({"microbatches": None}))
    split = train_laid_out(lambda: rows(model), layout_settings({"microbatches": None, "tensor": 2}))
    assert furthest(split.weights, plain.weights) < 1e-12


def test_a_whole_parameter_of_what_is_split_gets_its_whole_gradient_in_a_pipeline() -> None:
    plain = train_laid_out(lambda: rows(Scaled), layout_settings({"microbatches": None}, accumulate=4))
    network = {"tensor": 2, "pipeline": 2, "split": ["narrow"]}
    split = train_laid_out(lambda: rows(Scaled), layout_settings(network))
    assert furthest(split.weights, plain.weights) < 1e-12


def test_a_plan_that_tears_a_gradient_apart_is_refused_with_the_parameter() -> None:
    with pytest.raises(ConfigError, match="The parameter 'scale' takes part in what this plan splits"):
        train_laid_out(lambda: rows(Torn, Planned), layout_settings({"microbatches": None, "tensor": 2}))


def test_a_plan_is_refused_for_what_a_gate_of_zero_hides() -> None:
    with pytest.raises(ConfigError, match="This plan changes what the model computes"):
        train_laid_out(lambda: rows(Hidden, Planned), layout_settings({"microbatches": None, "tensor": 2}))


def test_parameters_that_begin_as_zeros_do_so_after_the_model_is_split() -> None:
    models = [build(Gated) for _ in range(2)]

    def run(group: Collective) -> None:
        model = models[group.rank]
        with torch.no_grad():
            model.gate.zero_()
            model.narrow.weight.zero_()
        with nothing_hidden(model):
            assert model.gate.any()
            assert model.narrow.weight.any()
            split_model(model, {"wide": "output", "narrow": "input"}, lambda: group, group.rank, group.size)
        assert not model.gate.any()
        assert not model.narrow.weight.any()
        assert model.narrow.weight.shape == (6, 8)
        assert model.wide.weight.all()

    run_replicas(2, run)


def test_looking_at_gradients_leaves_none_behind_and_modes_alone() -> None:
    models = [build(Scaled) for _ in range(2)]

    def run(group: Collective) -> set[str]:
        model = models[group.rank]
        model.narrow.eval()
        example = torch.linspace(-1.0, 1.0, 18, dtype=torch.float64).view(3, 6)
        plan = {"wide": "output", "narrow": "input"}
        split = split_model(model, plan, lambda: group, group.rank, group.size, example=example)
        assert [module.training for module in (model, model.wide, model.narrow)] == [True, True, False]
        assert all(parameter.grad is None for parameter in model.parameters())
        return split.partial

    assert run_replicas(2, run) == [{"scale"}, {"scale"}]


def test_parts_are_told_from_wholes_in_single_precision() -> None:
    models = [build(Scaled).float() for _ in range(2)]

    def run(group: Collective) -> set[str]:
        model = models[group.rank]
        example = torch.linspace(-1.0, 1.0, 18).view(3, 6)
        plan = {"wide": "output", "narrow": "input"}
        return split_model(model, plan, lambda: group, group.rank, group.size, example=example).partial

    assert run_replicas(2, run) == [{"scale"}, {"scale"}]


def test_a_sparse_gradient_of_what_stays_whole_is_compared_like_others() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(9, 8, sparse=True)
            self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.narrow(torch.tanh(self.wide(self.table(ids))))
            return y

    models = [build(Bag) for _ in range(2)]

    def run(group: Collective) -> set[str]:
        plan = {"wide": "output", "narrow": "input"}
        ids = torch.arange(6).view(2, 3)
        return split_model(models[group.rank], plan, lambda: group, group.rank, group.size, example=ids).partial

    assert run_replicas(2, run) == [set(), set()]
