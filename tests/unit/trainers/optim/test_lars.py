"""LARS and LAMB, against the algorithms of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from orchestray.trainers.optim.lars import LAMB, LARS

SHAPES = [(5, 7), (33,), (), (2, 3, 4), (1,)]
LR = 0.05


@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.01, "momentum": 0.5, "trust_coefficient": 0.02}])
def test_lars_equals_algorithm_1_of_its_paper(arguments: dict[str, float]) -> None:
    momentum = arguments.get("momentum", 0.9)
    decay = arguments.get("weight_decay", 0.0)
    trust = arguments.get("trust_coefficient", 0.001)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    optimizer = LARS(**arguments)
    optimizer.init([(str(index), parameter) for index, parameter in enumerate(params)])
    weights = [p.flatten().tolist() for p in params]
    velocities = [[0.0] * len(w) for w in weights]
    for step in range(1, 101):
        grads: list[Tensor | None] = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        grads[step % len(grads)] = None
        optimizer.step(params, grads, LR)
        for w, v, grad in zip(weights, velocities, grads, strict=True):
            if grad is None:
                continue
            g = grad.flatten().tolist()
            norm_w, norm_g = math.hypot(*w), math.hypot(*g)
            local = trust * norm_w / (norm_g + decay * norm_w + 1e-8)
            for i in range(len(w)):
                v[i] = momentum * v[i] + LR * local * (g[i] + decay * w[i])
                w[i] -= v[i]
    for own, w in zip(params, weights, strict=True):
        assert own.flatten().tolist() == pytest.approx(w, rel=1e-12, abs=1e-12)


def test_lars_moves_a_parameter_that_is_all_zero() -> None:
    parameter, grad = torch.zeros(3), torch.ones(3)
    optimizer = LARS(momentum=0.0)
    optimizer.init([("bias", parameter)])
    optimizer.step([parameter], [grad], 0.5)
    assert parameter.tolist() == [-0.5] * 3


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_equals_algorithm_2_of_its_paper(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    optimizer = LAMB(betas=(0.8, 0.95), weight_decay=decay)
    optimizer.init([(str(index), parameter) for index, parameter in enumerate(params)])
    weights = [p.clone() for p in params]
    firsts, seconds = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    counts = [0] * len(params)
    for step in range(1, 31):
        grads: list[Tensor | None] = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        grads[step % len(grads)] = None
        optimizer.step(params, grads, LR)
        for index, (w, g) in enumerate(zip(weights, grads, strict=True)):
            if g is None:
                continue
            counts[index] += 1
            m, v = 0.8 * firsts[index] + 0.2 * g, 0.95 * seconds[index] + 0.05 * g * g
            firsts[index], seconds[index] = m, v
            unbiased = m / (1 - 0.8 ** counts[index]), v / (1 - 0.95 ** counts[index])
            u = unbiased[0] / (unbiased[1].sqrt() + 1e-6) + decay * w
            weights[index] = w - LR * w.norm() / u.norm() * u
    for own, w in zip(params, weights, strict=True):
        assert torch.allclose(own, w, rtol=1e-6, atol=1e-9)
