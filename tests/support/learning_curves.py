"""Learning curves of several families, of which none is a grid point of the model that predicts them, and real ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional


def draw_curves(seed: int, num_trials: int, num_steps: int, noise: float = 0.005) -> np.ndarray:
    """Draw accuracies, [num_trials, num_steps]: shifted powers, stretched exponentials and powers of logarithms."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    curves = np.empty((num_trials, num_steps))
    for trial in range(num_trials):
        final = rng.uniform(0.6, 0.98)
        gained = final - rng.uniform(0.05, 0.15)
        family = rng.integers(3)
        if family == 0:
            missing = (1 + steps * rng.uniform(0.02, 0.5)) ** -rng.uniform(0.5, 2)
        elif family == 1:
            missing = np.exp(-((steps / rng.uniform(3, 40)) ** rng.uniform(0.6, 1.3)))
        else:
            missing = 1 / np.log(np.e + steps * rng.uniform(0.1, 3)) ** rng.uniform(1, 3)
        curves[trial] = final - gained * missing
    return curves + rng.normal(0, noise, curves.shape)


@cache
def trained_curves(num_trials: int = 80, num_steps: int = 100) -> np.ndarray:
    """Train small networks side by side to read digits, each with a rate and a momentum of its own.

    Returns:
        The part of the held-out images that each reads right after each step, `[num_trials, num_steps]`.
    """
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    draws = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=draws)
    held, learned = order[:360], order[360:]
    lr = 10 ** (torch.rand(num_trials, 1, 1, generator=draws) * 3 - 2)  # of 0.01 to 10
    momentum = 0.9 * torch.rand(num_trials, 1, 1, generator=draws)
    weights = [
        (torch.randn(num_trials, *shape, generator=draws) / shape[0] ** 0.5).requires_grad_()
        for shape in ((64, 32), (32, 10))
    ]
    moves = [torch.zeros_like(weight) for weight in weights]

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        hidden = (inputs[rows].expand(num_trials, -1, -1) @ weights[0]).relu()
        return hidden @ weights[1]

    curves = np.empty((num_trials, num_steps))
    for step in range(num_steps):
        rows = learned[torch.randint(len(learned), (64,), generator=draws)]
        wanted = targets[rows].expand(num_trials, -1).reshape(-1)
        loss = functional.cross_entropy(outputs(rows).reshape(-1, 10), wanted, reduction="sum") / len(rows)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, move, gradient in zip(weights, moves, gradients, strict=True):
                move.mul_(momentum).add_(gradient)
                weight -= lr * move
            curves[:, step] = (outputs(held).argmax(2) == targets[held]).double().mean(1).numpy()
    return curves
