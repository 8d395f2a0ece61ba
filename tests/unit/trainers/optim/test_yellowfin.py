"""YellowFin against a transcription of the paper, and under the schemes that it works with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.optim.curvature import cubic_root, single_step
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.yellowfin import YellowFin
from support.layouts import layout_settings, train_laid_out
from support.training import digits, furthest, regression, same_bits, train

YELLOWFIN = {"type": "yellowfin", "beta": 0.99, "window": 5}


def transcribed(
    gradients: list[np.ndarray], weights: np.ndarray, beta: float = 0.999, width: int = 20
) -> list[tuple[np.ndarray, float, float]]:
    """Run algorithms 1 to 4 of the paper, a line a line; return weights, momentum and rate after each step.

    In addition, averages are divided by 1 - beta^t (section 4), and the curvature's range is averaged as its logarithm.
    The rate rises over the first 10 windows.
    """
    h_min = h_max = norm = h = distance = 0.0
    g, g2 = np.zeros_like(weights), np.zeros_like(weights)
    velocity = np.zeros_like(weights)
    seen: list[float] = []
    path = []
    for t, gradient in enumerate(gradients, start=1):
        debias = 1.0 - beta**t
        # Algorithm 2, curvature range
        seen = [*seen, float(np.sum(gradient**2))][-width:]
        h_max = beta * h_max + (1 - beta) * math.log(max(seen))
        h_min = beta * h_min + (1 - beta) * math.log(min(seen))
        # Algorithm 3, gradient variance
        g2 = beta * g2 + (1 - beta) * gradient**2
        g = beta * g + (1 - beta) * gradient
        variance = float(np.sum(g2 / debias - (g / debias) ** 2))
        # Algorithm 4, distance to the optimum
        norm = beta * norm + (1 - beta) * float(np.linalg.norm(gradient))
        h = beta * h + (1 - beta) * float(np.sum(gradient**2))
        distance = beta * distance + (1 - beta) * norm / h
        # Algorithm 1, SingleStep: the minimum by its definition, on a grid that is refined
        low, high = math.exp(h_min / debias), math.exp(h_max / debias)
        bound = (math.sqrt(high / low) - 1) / (math.sqrt(high / low) + 1)
        a, b = bound, 1.0
        for _ in range(60):
            roots = np.linspace(a, b, 21)
            cost = roots**2 * (distance / debias) ** 2 + ((1 - roots) ** 2 / low) ** 2 * max(variance, 0.0)
            best = int(np.argmin(cost))
            a, b = roots[max(best - 1, 0)], roots[min(best + 1, 20)]
        momentum = float(((a + b) / 2) ** 2)
        rate = (1 - math.sqrt(momentum)) ** 2 / low * min(1.0, t / (10 * width))
        velocity = momentum * velocity - rate * gradient
        weights = weights + velocity
        path.append((weights, momentum, rate))
    return path


def test_it_goes_where_the_papers_algorithms_go() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 2))
    gradients = [rng.normal(0.3, 1.0, size=(3, 2)) * (1 + 0.5 * math.sin(t)) for t in range(80)]
    weight = nn.Parameter(torch.tensor(start))
    optimizer = make_optimizer(**YELLOWFIN)
    assert isinstance(optimizer, YellowFin)
    optimizer.init([("weight", weight)])
    for gradient, (weights, momentum, rate) in zip(
        gradients, transcribed(gradients, start, beta=0.99, width=5), strict=True
    ):
        optimizer.step([weight], [torch.tensor(gradient)], 1.0)
        measured = optimizer.measured
        assert measured.momentum == pytest.approx(momentum, abs=1e-6)  # as fine as the grid finds a flat minimum
        assert measured.lr == pytest.approx(rate, rel=1e-5)
        np.testing.assert_allclose(weight.detach().numpy(), weights, rtol=1e-4, atol=1e-6)


def test_the_cubic_is_solved_in_closed_form() -> None:
    for ratio in np.logspace(-12, 11, 47):
        x = cubic_root(float(ratio), 1.0)
        assert 0.0 <= x <= 1.0
        assert ratio * x == pytest.approx((1.0 - x) ** 3, rel=1e-6)
    assert cubic_root(1.0, 0.0) == 0.0


def test_the_momentum_is_never_below_what_the_curvatures_range_needs() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        variance, distance, h_min = np.exp(rng.normal(size=3) * 2)
        kappa = float(np.exp(abs(rng.normal()) * 3))
        momentum, lr = single_step(variance, distance, h_min, h_min * kappa)
        root = math.sqrt(kappa)
        assert momentum >= ((root - 1) / (root + 1)) ** 2 - 1e-12
        # The robust region (equation 7): (1 - sqrt(mu))^2 / h_min <= lr <= (1 + sqrt(mu))^2 / h_max.
        assert (1 - math.sqrt(momentum)) ** 2 / h_min <= lr * (1 + 1e-9)
        assert lr <= (1 + math.sqrt(momentum)) ** 2 / (h_min * kappa) * (1 + 1e-9)


def test_replicas_tune_as_one_process_does() -> None:
    task = regression()
    alone = train(task, steps=30, optimizer=YELLOWFIN)[0]
    for replica in train(task, 3, steps=30, optimizer=YELLOWFIN):
        assert furthest(alone.after, replica.after) < 1e-12
        assert furthest(alone.optimizer[-1], replica.optimizer[-1]) < 1e-9


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_sharded_replicas_tune_as_one_process_does(shard: str) -> None:
    task = regression()
    alone = train(task, steps=20, optimizer=YELLOWFIN)[0]
    for replica in train(task, 2, steps=20, optimizer=YELLOWFIN, exchange={"shard": shard}):
        assert furthest(alone.after, replica.after) < 1e-12


def test_a_stage_that_trains_nothing_takes_part_in_the_sums() -> None:
    class Headed(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
            self[0].requires_grad_(False)

    rows = regression()
    rows.build_model = Headed  # type: ignore[method-assign]
    alone, staged = (
        train_laid_out(lambda: rows, layout_settings(network, optimizer=YELLOWFIN, steps=4)).weights
        for network in ({}, {"pipeline": 2, "split": ["2"]})
    )
    assert furthest(staged, alone) < 1e-12


def test_what_it_tuned_is_in_the_lines_and_in_the_checkpoint(tmp_path: Any) -> None:
    task = digits()
    whole = train(task, steps=30, optimizer=YELLOWFIN)[0]
    assert {"tuned_lr", "tuned_momentum"} <= whole.steps[-1].keys()
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        train(task, steps=15, optimizer=YELLOWFIN, checkpoints=writer)
    found, _ = latest_good(str(tmp_path))
    rest = train(task, steps=30, optimizer=YELLOWFIN, load=lambda: Loaded(found))[0]
    assert len(rest.steps) == 15
    assert same_bits(whole.after, rest.after)
    assert same_bits(whole.optimizer[-1], rest.optimizer[-1])


def test_a_parameter_that_is_not_used_for_a_while_does_not_set_the_tuner_back() -> None:
    optimizer = make_optimizer(**YELLOWFIN)
    assert isinstance(optimizer, YellowFin)
    weights = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    optimizer.init(list(zip("ab", weights, strict=True)))
    gradient = torch.ones(2, dtype=torch.float64)
    for used in ([gradient, gradient], [None, gradient], [None, gradient], [gradient, None]):
        optimizer.step(weights, used, 1.0)
    assert optimizer.measured.step == 4


@pytest.mark.parametrize("beta", [0.0, 0.99])
@pytest.mark.parametrize("zeros_after", [0, 3])
def test_a_gradient_of_zeros_leaves_what_is_measured_as_it_was(zeros_after: int, beta: float) -> None:
    drawn = list(torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def tuned(gradients: list[torch.Tensor]) -> list[float]:
        optimizer, weight = YellowFin(beta=beta, window=3), torch.ones(6, dtype=torch.float64)
        optimizer.init([("weight", weight)])
        for gradient in gradients:
            optimizer.step([weight], [gradient], 1.0)
        return optimizer.measured.values()

    zeros = [torch.zeros(6, dtype=torch.float64)] * 2
    assert tuned([*drawn[:zeros_after], *zeros, *drawn[zeros_after:]]) == pytest.approx(tuned(drawn), rel=1e-12)
