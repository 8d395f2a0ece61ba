"""Group G: tuners that set momentum, learning rate and staleness while the training goes on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.trainers.online.yellowfin import YellowFin
from orchestray.trainers.optimizers import make_optimizer


def test_yellowfin_tunes_the_momentum_to_the_square_of_root_kappa_minus_1_over_root_kappa_plus_1() -> None:
    """Where curvatures range over kappa and the noise is small; its curvature is the squared norm of a gradient."""
    for kappa in (4.0, 9.0, 25.0):
        optimizer = make_optimizer("yellowfin", beta=0.99, slow_start=False)
        assert isinstance(optimizer, YellowFin)
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer.init([("weight", weight)])
        rng = np.random.default_rng(0)
        middle = math.sqrt(kappa) * 0.5 + 0.5
        for step in range(600):
            size = {0: 1.0, 10: math.sqrt(kappa)}.get(step % 20, middle)
            gradient = size * (1.0 + 1e-3 * rng.normal())
            optimizer.step([weight], [torch.tensor([gradient], dtype=torch.float64)], 1.0)
        wanted = ((math.sqrt(kappa) - 1.0) / (math.sqrt(kappa) + 1.0)) ** 2
        assert optimizer.measured.momentum == pytest.approx(wanted, abs=0.01), kappa


def steps_to(target: float, optimizer: str, lr: float, seed: int, most: int = 4000) -> int:
    """Steps until a noisy quadratic, curvatures 0.1 to 10 in 10 dimensions, has come down to `target` of its start."""
    torch.manual_seed(seed)
    curvatures = torch.logspace(-1, 1, 10, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(10, dtype=torch.float64))
    updates = make_optimizer(optimizer)
    updates.init([("weight", weight)])
    start = float((curvatures * weight.detach() ** 2).sum())
    for step in range(1, most + 1):
        gradient = curvatures * weight.detach() + 0.01 * torch.randn(10, dtype=torch.float64)
        updates.step([weight], [gradient], lr)
        if float((curvatures * weight.detach() ** 2).sum()) <= target * start:
            return step
    return most


def test_yellowfin_untuned_is_not_slower_than_adam_at_its_default_rate(
    record_property: Callable[[str, object], None],
) -> None:
    ours = np.median([steps_to(1e-2, "yellowfin", 1.0, seed) for seed in range(5)])
    adam = np.median([steps_to(1e-2, "adam", 1e-3, seed) for seed in range(5)])
    record_property("steps to 1e-2: yellowfin", float(ours))
    record_property("steps to 1e-2: adam", float(adam))
    assert ours <= adam
