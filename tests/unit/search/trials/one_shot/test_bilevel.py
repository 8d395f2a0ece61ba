"""The architecture's gradient, first and second order, against finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.search.trials.one_shot.bilevel import architecture_gradient

torch.set_num_threads(1)


class Problem:
    """A small mixed network: softmax-weighted operations between two layers, on two sets of data."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.data = {"train": (normal(12, 3), normal(12)), "judge": (normal(12, 3), normal(12))}
        self.weights = [normal(3, 4) / 2, normal(4) / 2]
        self.alphas = [normal(1, 3), normal(4, 3)]

    def loss(self, split: str, weights: list[Tensor], alphas: list[Tensor]) -> Tensor:
        inputs, targets = self.data[split]
        hidden = inputs @ weights[0]
        operations = torch.stack([hidden, hidden.square(), torch.sin(3 * hidden)], dim=-1)
        mixed = (operations * torch.softmax(alphas[0] + alphas[1], dim=-1)).sum(-1)
        return (mixed @ weights[1] - targets).square().mean()

    def unrolled(self, alphas: list[Tensor], lr: float) -> Tensor:
        """Return the loss on the architecture's data after a step of the weights."""
        points = [weight.clone().requires_grad_() for weight in self.weights]
        grads = torch.autograd.grad(self.loss("train", points, alphas), points)
        ahead = [weight - lr * grad for weight, grad in zip(self.weights, grads, strict=True)]
        return self.loss("judge", ahead, alphas)


@pytest.mark.parametrize("lr", [0.0, 0.05])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_is_the_finite_difference_of_the_loss_after_a_step_of_the_weights(seed: int, lr: float) -> None:
    problem = Problem(seed)
    found = architecture_gradient(
        lambda weights, alphas: problem.loss("train", weights, alphas),
        lambda weights, alphas: problem.loss("judge", weights, alphas),
        problem.weights,
        problem.alphas,
        weights_lr=lr,
    )
    delta = 1e-6
    for alpha, gradient in zip(problem.alphas, found, strict=True):
        for place in range(alpha.numel()):
            flat = alpha.view(-1)
            flat[place] += delta
            above = float(problem.unrolled(problem.alphas, lr))
            flat[place] -= 2 * delta
            below = float(problem.unrolled(problem.alphas, lr))
            flat[place] += delta
            # The Hessian's product is itself a difference of two gradients: exact to the second order of its step.
            tolerance = 1e-7 if lr == 0 else 2e-4
            assert float(gradient.view(-1)[place]) == pytest.approx((above - below) / (2 * delta), abs=tolerance)


def test_second_order_differs_from_the_first_by_what_the_weights_learn() -> None:
    problem = Problem(0)
    losses = [lambda w, a, split=split: problem.loss(split, w, a) for split in ("train", "judge")]
    first, second = (
        architecture_gradient(*losses, problem.weights, problem.alphas, weights_lr=lr) for lr in (0.0, 0.05)
    )
    assert max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) > 1e-2


@pytest.mark.parametrize("lr", [0.0, 0.05])
def test_an_architecture_that_no_cell_of_the_network_has_gets_no_gradient(lr: float) -> None:
    problem, unused = Problem(0), torch.ones(4, 3, dtype=torch.float64)
    losses = [lambda w, a, split=split: problem.loss(split, w, a[:2]) for split in ("train", "judge")]
    *_, found = architecture_gradient(*losses, problem.weights, [*problem.alphas, unused], weights_lr=lr)
    assert torch.equal(found, torch.zeros_like(unused))
