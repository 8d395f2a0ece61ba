"""Profiles count what is kept and sent, and leave no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.parallel.pipeline.cutting import layers_of
from orchestray.trainers.parallel.pipeline.profile import profile_layers
from support.cut_models import MODELS, build, loss_of, vectors

NO_TASK: Any = SimpleNamespace()


def test_bytes_of_parameters_activations_and_boundaries_are_those_of_the_formula() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)).double()
    costs = profile_layers(layers_of(NO_TASK, model), vectors(5), loss_of)
    assert [cost.parameter_bytes for cost in costs] == [8 * 56, 0, 8 * 64, 8 * 27]
    # The first layer saves its input, Tanh its output, which the third saves as well; the last saves its input.
    assert [cost.activation_bytes for cost in costs] == [8 * 30, 8 * 40, 0, 8 * 40]
    assert [cost.received_bytes for cost in costs] == [0, 0, 8 * 40, 0]
    assert [cost.loss_bytes for cost in costs] == [0, 0, 0, 8 * 15]  # the square of the outputs
    assert [cost.boundary_bytes for cost in costs] == [8 * 40, 8 * 40, 8 * 40, 0]


def test_a_skip_is_counted_at_every_boundary_it_crosses() -> None:
    costs = profile_layers(layers_of(NO_TASK, build("residual")), vectors(5), loss_of)
    assert [cost.boundary_bytes for cost in costs[:4]] == [8 * 40, 8 * 80, 8 * 80, 8 * 40]


def test_shared_parameters_are_counted_once() -> None:
    model = build("tied_attention")
    costs = profile_layers(layers_of(NO_TASK, model), MODELS["tied_attention"][1](), loss_of, repeats=1)
    assert sum(cost.parameter_bytes for cost in costs) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_changed_by_profiling(name: str) -> None:
    model = build(name).eval()
    layers = layers_of(NO_TASK, model)
    inputs = MODELS[name][1]()
    first, *_ = model.parameters()
    first.grad = torch.full_like(first, 3.0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    kept_inputs, random = inputs.clone(), torch.get_rng_state()
    with torch.no_grad():
        costs = profile_layers(layers, inputs, loss_of, repeats=2)
    assert len(costs) == len(layers)
    assert all(cost.forward_s > 0 and cost.backward_s > 0 and cost.compute_s > cost.forward_s for cost in costs)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(inputs, kept_inputs)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not first)


class Clock:
    """A clock that goes on only when layers advance it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward_s: list[float], backward_s: float) -> Tensor:
        clock.now_s += forward_s[0]
        forward_s.append(forward_s.pop(0))
        ctx.clock, ctx.backward_s = clock, backward_s
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now_s += ctx.backward_s
        return gradient, None, None, None


class Slow(nn.Module):
    """A layer that takes the given times forward, one after the other, and back."""

    def __init__(self, clock: Clock, forward_s: list[float], backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Timed.apply(self.linear(x), self.clock, self.forward_s, self.backward_s)


def test_a_layers_times_are_the_medians_of_its_own() -> None:
    clock = Clock()
    model = nn.Sequential(Slow(clock, [9, 1, 7, 2], 4), Slow(clock, [0], 8), Slow(clock, [99, 5, 5, 0], 0.5))
    costs = profile_layers(layers_of(NO_TASK, model), vectors(), loss_of, repeats=3, warm_up=1, clock=clock)
    assert [(cost.forward_s, cost.backward_s) for cost in costs] == [(2, 4), (0, 8), (5, 0.5)]
