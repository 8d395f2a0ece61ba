"""Deep stacking networks: modules one after the other, output weights by least squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.solvers.admm import Samples
from orchestray.trainers.solvers.stacking import Stacking
from orchestray.trainers.tasks.digits_networks import DeepStacking, DeepStackingDigits
from support.training import digits, train

WIDTH, DEPTH, OUTPUTS = 4, 3, 2


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


class Solved:
    """A small network, moved step by step."""

    def __init__(self, steps_per_module: int) -> None:
        torch.manual_seed(0)
        self.model = DeepStacking(5, WIDTH, DEPTH, OUTPUTS).double()
        self.samples = Samples(draws(30, 5), draws(30, OUTPUTS, seed=1), torch.arange(30), "squared_error")
        self.solver = Stacking(steps_per_module)
        self.solver.look_at(self.model, 30)
        self.x = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.solver.begin(self.x)

    def step(self, lr: float = 0.1) -> dict[str, float]:
        oracle: Any = OneReplica(self.samples)
        taken = self.solver.find(self.x, oracle, lr)
        self.solver.make(taken)
        self.x = taken.x
        nn.utils.vector_to_parameters(self.x, self.model.parameters())
        return dict(taken.metrics)

    def module(self, index: int) -> dict[str, Tensor]:
        """Return copies of the weights of a module."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        own = {name: found[name].chunk(DEPTH)[index] for name in ("raw.weight", "raw.bias")}
        own |= {name: found[name] for name in found if name.startswith(f"upper.{index}.")}
        return own | ({"previous": found[f"previous.{index - 1}.weight"]} if index else {})

    def hidden(self, index: int) -> Tensor:
        """Return the hidden units of a module for all samples."""
        seen = self.samples.inputs[:, :0]
        for below in range(index + 1):
            raw = self.model.raw(self.samples.inputs).chunk(DEPTH, 1)[below]
            hidden = torch.sigmoid(raw + (self.model.previous[below - 1](seen) if below else 0.0))
            seen = torch.cat([seen, self.model.upper[below](hidden)], 1)
        return hidden


def test_modules_are_trained_one_after_the_other_and_those_below_keep_every_bit() -> None:
    solved = Solved(steps_per_module=2)
    for step in range(8):
        before = [solved.module(index) for index in range(DEPTH)]
        metrics = solved.step()
        trained = min(step // 2, DEPTH - 1)
        assert metrics["module"] == trained + 1
        for index, weights in enumerate(before):
            moved = [name for name, values in solved.module(index).items() if not torch.equal(values, weights[name])]
            assert sorted(moved) == (sorted(weights) if index == trained else [])


def test_output_weights_are_least_squares_and_lower_ones_follow_the_gradient_of_what_these_leave() -> None:
    solved = Solved(steps_per_module=1)
    for index in range(DEPTH):
        before = {name: p.detach().clone().requires_grad_() for name, p in solved.model.named_parameters()}
        lr = 1e-3
        solved.step(lr)
        hidden = solved.hidden(index).detach()
        outputs = solved.model.upper[index](hidden)
        residual = (outputs - solved.samples.targets).detach()
        extended = torch.cat([hidden, torch.ones(30, 1, dtype=torch.float64)], 1)
        assert float((extended.T @ residual).abs().max()) < 1e-10  # orthogonal to what it is a sum of
        # Autograd differentiates the least error that any output weights leave, the solution of the equations included.
        raw = nn.functional.linear(solved.samples.inputs, before["raw.weight"], before["raw.bias"]).chunk(DEPTH, 1)
        seen = solved.samples.inputs[:, :0]
        for below in range(index + 1):
            own = raw[below] + (seen @ before[f"previous.{below - 1}.weight"].T if below else 0.0)
            units = torch.sigmoid(own)
            if below < index:
                y = units @ before[f"upper.{below}.weight"].T + before[f"upper.{below}.bias"]
                seen = torch.cat([seen, y], 1).detach()
        design = torch.cat([units, torch.ones(30, 1, dtype=torch.float64)], 1)
        solution = torch.linalg.solve(design.T @ design, design.T @ solved.samples.targets)
        error = (design @ solution - solved.samples.targets).square().sum() / 30
        names = ["raw.weight", "raw.bias", *([f"previous.{index - 1}.weight"] if index else [])]
        after = dict(solved.model.named_parameters())
        for name, gradient in zip(names, torch.autograd.grad(error, [before[name] for name in names]), strict=True):
            moved = (before[name] - after[name]).detach() / lr
            rows = slice(WIDTH * index, WIDTH * (index + 1)) if name.startswith("raw") else slice(None)
            torch.testing.assert_close(moved[rows], gradient[rows], rtol=1e-6, atol=1e-9)


def test_each_module_that_is_stacked_leaves_less_error_and_the_digits_are_learned() -> None:
    (run,) = train(
        DeepStackingDigits(width=24, depth=3),
        batch_size=1500,
        steps=30,
        optimizer=None,
        solver={"type": "stacking", "steps_per_module": 10, "lr": 20.0},
        validate_every_steps=30,
    )
    errors = [line["squared_error"] for line in run.steps]
    assert errors[9] > errors[19] > errors[29]
    assert errors[9] < errors[0]
    assert run.outcome.final["validation"]["accuracy"] > 0.9


def test_models_that_are_no_stack_are_refused() -> None:
    with pytest.raises(ConfigError, match="stacking trains a deep stacking network, a model with the layers `raw`"):
        train(digits(hidden=[8]), batch_size=1500, steps=1, optimizer=None, solver={"type": "stacking"})
