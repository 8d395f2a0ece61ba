"""The survey's servers in a hierarchy (table D), as whole runs."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits, furthest
from support.virtual_training import LeastSquares, VirtualTraining


def task() -> Any:
    return few_digits()


def test_hierarchical_ps_in_lock_step_is_the_flat_server_and_the_single_process(tmp_path: Path) -> None:
    exchange = {"shards": 2}
    flat = train_central(task, central_settings(4, exchange, steps=4), tmp_path / "flat")
    tree = train_central(task, central_settings(4, {**exchange, "groups": 2}, steps=4), tmp_path / "tree")
    one = train_laid_out(task, layout_settings(steps=4))
    assert furthest(tree.weights, flat.weights) <= 1e-12
    assert furthest(tree.weights, one.weights) <= 1e-12
    assert tree.losses == pytest.approx(one.losses, rel=0, abs=1e-12)


# -- without processes: real coordinator and shard, in virtual time ---------------------------------------------------


class Classes:
    """Samples of five classes around centres, and a linear map onto the classes with the squared error."""

    num_samples, num_features = 1024, 100

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num = 2 * self.num_samples
        centres = torch.randn(5, 20, generator=generator, dtype=torch.float64)
        self._labels = torch.randint(5, (num,), generator=generator)
        self._inputs = centres[self._labels] + 1.5 * torch.randn(num, 20, generator=generator, dtype=torch.float64)

    def loss(self, weights: Tensor) -> float:
        return 0.0

    def gradient(self, weights: Tensor, rows: Tensor) -> Tensor:
        inputs = self._inputs[rows]
        wrong = inputs @ weights.view(5, 20).T
        wrong[torch.arange(len(rows)), self._labels[rows]] -= 1
        return (wrong.T @ inputs).div_(len(rows)).reshape(-1)

    def accuracy(self, weights: Tensor) -> float:
        """Return the accuracy on samples that were not trained with."""
        found = (self._inputs[self.num_samples :] @ weights.view(5, 20).T).argmax(1)
        return float((found == self._labels[self.num_samples :]).double().mean())


RATE, UPDATES = 0.05, 96


def accuracies(n: int, agents: int, minibatch: int, *, scaled: bool) -> Tensor:
    """Train under n-softsync with one rate for each update, in which each gradient is about n updates old.

    Return the accuracies of three seeds.
    """
    found = []
    for seed in range(3):
        rng, problem = random.Random(seed), Classes(seed)
        run = VirtualTraining(
            problem,
            lambda _worker, rng=rng: rng.uniform(0.5, 1.5),  # type: ignore[misc]
            agents,
            consistency="asynchronous",
            batch_size=agents * minibatch,
            epochs=None,
            total_steps=UPDATES // n,
            lr=RATE * n,  # an update has the n-th part of a batch
            lr_scale=scaled,
            pushes_per_update=agents // n,
        )
        run.run()
        assert run.num_updates == UPDATES
        found.append(problem.accuracy(run.weights))
    return torch.tensor(found)


def test_rudra_a_rate_over_the_staleness_recovers_the_accuracy_that_staleness_costs() -> None:
    """Sweep staleness (n), agents and minibatch, with and without scaling: the paper's claim, as mean and deviation."""
    for minibatch in (16, 64):
        found = {
            (n, agents, scaled): accuracies(n, agents, minibatch, scaled=scaled)
            for n, agents, scaled in ((1, 4, False), (4, 4, True), (4, 16, True), (16, 16, False), (16, 16, True))
        }
        fresh = found[1, 4, False].mean()
        unscaled, scaled = found[16, 16, False], found[16, 16, True]
        assert fresh > 0.8
        assert fresh - unscaled.mean() > 0.3
        assert fresh - scaled.mean() < 0.02
        assert scaled.mean() - scaled.std() > unscaled.mean() + unscaled.std()
        # The staleness is n, whatever the number of agents.
        assert abs(found[4, 4, True].mean() - found[4, 16, True].mean()) < 0.02


NUM_WORKERS = 16


def of_softsync(n: int, seed: int) -> VirtualTraining:
    """Train by 16 workers of about one speed in virtual time, whose server makes an update of 16 / n gradients."""
    rng = random.Random(seed)
    run = VirtualTraining(
        LeastSquares(seed),
        lambda _worker: rng.uniform(0.5, 1.5),
        NUM_WORKERS,
        consistency="asynchronous",
        batch_size=60,
        epochs=40,
        lr=0.05,
        pushes_per_update=NUM_WORKERS // n,
    )
    run.run()
    return run


def test_under_n_softsync_a_gradient_is_about_n_updates_old_and_no_more_than_2_n() -> None:
    """Sweep Rudra's n over 1, 2 and 4: gradients of one round of all workers make n updates."""
    for n in (1, 2, 4):
        run = of_softsync(n, seed=n)
        behind = run.updates_behind[2 * NUM_WORKERS :]
        assert fmean(behind) == pytest.approx(n * (1 - 1 / NUM_WORKERS), rel=0.1)
        assert sum(late > 2 * n for late in behind) < 0.01 * len(behind)
        assert run.num_updates == len(run.updates_behind) * n // NUM_WORKERS
