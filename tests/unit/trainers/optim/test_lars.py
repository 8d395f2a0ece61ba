"""LARS, against the algorithm of its paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from orchestray.trainers.optim.lars import LARS

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
