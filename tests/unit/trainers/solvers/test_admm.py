"""ADMM: each update is the minimum over its variable, and training needs no backward pass."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.solvers.admm import Admm, Samples, kind_of_loss, nearest_before_relu, nearest_to_loss
from support.training import digits, train


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_weighted_sums_of_a_hidden_layer_are_the_minimum_that_a_search_finds() -> None:
    outputs, given = 2.0 * draws(6, 5), 2.0 * draws(6, 5, seed=1)
    found = nearest_before_relu(outputs, given, gamma=10.0, beta=1.5)
    for a, m, z in zip(outputs.flatten().tolist(), given.flatten().tolist(), found.flatten().tolist(), strict=True):

        def cost(z: float, a: float = a, m: float = m) -> float:
            return 10.0 * (a - max(z, 0.0)) ** 2 + 1.5 * (z - m) ** 2

        grid = np.linspace(-8.0, 8.0, 1601)
        best = min(grid, key=cost)
        refined = minimize_scalar(cost, bounds=(best - 0.01, best + 0.01), method="bounded", options={"xatol": 1e-9})
        assert cost(z) <= cost(float(refined.x)) + 1e-9


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_weighted_sums_of_the_last_layer_are_a_minimum_of_the_loss_with_its_penalty(beta: float) -> None:
    given, multipliers = 3.0 * draws(8, 4), draws(8, 4, seed=1)
    classes = torch.arange(8) % 4
    samples = Samples(given, classes, torch.arange(8), "cross_entropy")
    z = nearest_to_loss(given, multipliers, samples, beta).requires_grad_()
    cost = nn.functional.cross_entropy(z, classes, reduction="sum") + (multipliers * z).sum()
    (gradient,) = torch.autograd.grad(cost + beta * (z - given).square().sum(), z)
    assert float(gradient.abs().max()) < 1e-10
    numbers = Samples(given, draws(8, 4, seed=2), torch.arange(8), "squared_error")
    z = nearest_to_loss(given, multipliers, numbers, beta).requires_grad_()
    cost = (z - numbers.targets).square().sum() + (multipliers * z).sum() + beta * (z - given).square().sum()
    assert float(torch.autograd.grad(cost, z)[0].abs().max()) < 1e-12


class OneReplica:
    """All samples, on one replica."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def samples(self) -> Samples:
        return self._samples

    def value(self, x: Tensor) -> float:
        return 0.0

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor


def test_each_variable_is_at_the_minimum_of_its_subproblem_and_multipliers_add_up() -> None:
    beta, gamma, count = 0.4, 1.5, 12
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    samples = Samples(draws(count, 3), draws(count, 2, seed=1), torch.arange(count), "squared_error")
    solver, oracle = Admm(beta, gamma, warmup_steps=1), OneReplica(samples)
    solver.look_at(network, count)
    x = draws(3 * 4 + 4 + 4 * 2 + 2, seed=2)
    solver.begin(x)
    for _ in range(3):
        before, taken = {k: v.clone() for k, v in solver.state.items()}, solver.find(x, cast("Any", oracle), 1.0)
        solver.make(taken)
        last, x = x, taken.x
    after = solver.state
    (_, _), (old_weight, old_bias) = solver._weights(last)
    (first, first_bias), (second, second_bias) = (
        [t.clone().requires_grad_() for t in pair] for pair in solver._weights(x)
    )
    hidden = after["outputs.0"].clone().requires_grad_()
    of_first = (before["sums.0"] - samples.inputs @ first.T - first_bias).square().sum()
    of_hidden = beta * (before["sums.1"] - hidden @ old_weight.T - old_bias).square().sum()
    of_hidden = of_hidden + gamma * (hidden - before["sums.0"].relu()).square().sum()
    of_second = (before["sums.1"] - after["outputs.0"] @ second.T - second_bias).square().sum()
    for cost, variables in ((of_first, [first, first_bias]), (of_hidden, [hidden]), (of_second, [second, second_bias])):
        for gradient in torch.autograd.grad(cost, variables):
            assert float(gradient.abs().max()) < 1e-9
    given = after["outputs.0"] @ second.T + second_bias
    assert float(before["outputs.1"].abs().max()) > 1e-3
    expected = before["outputs.1"] + 2 * beta * (after["sums.1"] - given)
    torch.testing.assert_close(after["outputs.1"], expected.detach(), rtol=1e-10, atol=1e-12)


def run(steps: int = 50, data: int = 1, **solver: Any) -> Any:
    return train(
        digits(hidden=[32]),
        data,
        batch_size=1500,
        steps=steps,
        optimizer=None,
        solver={"type": "admm", **solver},
        validate_every_steps=steps,
    )[0]


def test_digits_are_learned_without_a_backward_call_while_the_residuals_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differentiate(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("something was differentiated")

    for place, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
        monkeypatch.setattr(place, name, differentiate)
    with pytest.raises(TrainingError, match="differentiated"):  # where there is backpropagation, it is noticed
        train(digits(hidden=[32]), steps=1)
    trained = run()
    residuals = [line["residual"] for line in trained.steps]
    assert residuals[-1] < 0.3 * max(residuals)
    assert residuals[-1] < residuals[20]
    assert trained.outcome.final["validation"]["accuracy"] > 0.9
    assert all(parameter.grad is None for parameter in trained.replica.model.parameters())


def test_models_and_losses_without_a_closed_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"admm solves for the weights of an nn\.Sequential"):
        train(digits(model="cnn"), batch_size=1500, optimizer=None, solver={"type": "admm"})
    twice = nn.Linear(3, 3)
    normalised = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            passed: Tensor = super().forward(2 * x)
            return passed

    models = (nn.Sequential(twice, nn.ReLU(), twice), nn.Sequential(normalised), Doubled(nn.Linear(3, 3)))
    for model in models:
        with pytest.raises(ConfigError, match="all of them trained, none shared or normalised"):
            Admm().look_at(model, 5)
    outputs, targets = draws(5, 3), torch.arange(5) % 3
    loss = float(nn.functional.cross_entropy(outputs, targets))
    assert kind_of_loss(outputs, targets, loss, None) == "cross_entropy"
    numbers = draws(5, seed=2)
    squared = float((outputs[:, 0] - numbers).square().mean())
    assert kind_of_loss(outputs[:, :1], numbers, squared, None) == "squared_error"
    for of_task, weight in ((1.1 * loss, None), (loss, 5.0)):
        with pytest.raises(ConfigError, match="the task's loss is neither"):
            kind_of_loss(outputs, targets, of_task, weight)
