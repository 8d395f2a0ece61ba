"""The survey's servers in a hierarchy (table D), as whole runs."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.partition import Slice
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.server.shard import Origin, Rates, Shard
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


# -- without processes: the shard and the filter themselves, on a problem whose answer is known -----------------------


def separable(seed: int, num: int = 600) -> tuple[Tensor, Tensor]:
    """Return samples of five classes around centres, `[num, 20]`, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 20, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (num,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(num, 20, generator=generator, dtype=torch.float64), labels


def gradient_at(values: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean squared error of a linear map onto the classes, flat."""
    wrong = inputs @ values.view(5, 20).T
    wrong[torch.arange(len(labels)), labels] -= 1
    return (wrong.T @ inputs).div_(len(labels)).reshape(-1)


def accuracy(values: Tensor, inputs: Tensor, labels: Tensor) -> float:
    return float(((inputs @ values.view(5, 20).T).argmax(1) == labels).double().mean())


def stale_training(seed: int, agents: int, minibatch: int, *, scaled: bool) -> float:
    """Return the accuracy on new samples after agents in turn have pushed what they computed from old values."""
    inputs, labels = separable(seed, 1200)
    rest, rest_labels, inputs, labels = inputs[600:], labels[600:], inputs[:600], labels[:600]
    shard = Shard(
        [Slice("w", 0, 100, (5, 20))],
        torch.zeros(100, dtype=torch.float64),
        make_optimizer(type="sgd"),
        Rates(0.05),
        scale_by_staleness=scaled,
    )
    generator = torch.Generator().manual_seed(100 + seed)
    read = [(shard.values.clone(), 0) for _ in range(agents)]
    for update in range(4800 // minibatch):
        agent = update % agents
        values, version = read[agent]
        rows = torch.randint(600, (minibatch,), generator=generator)
        part = Part(update + 1, 0, minibatch, minibatch)
        done = shard.push(Origin(agent, (part,), version), gradient_at(values, inputs[rows], labels[rows]))
        assert done.staleness == min(update, agents - 1)
        read[agent] = (shard.values.clone(), shard.version)
    return accuracy(shard.values, rest, rest_labels)


def test_rudra_a_rate_over_the_staleness_recovers_the_accuracy_that_staleness_costs() -> None:
    """Vary staleness (by agents), minibatch and scaling, over three seeds: the paper's claim."""
    found = {
        (agents, minibatch, scaled): torch.tensor(
            [stale_training(seed, agents, minibatch, scaled=scaled) for seed in range(3)]
        )
        for agents in (1, 4, 16)
        for minibatch in (16, 64)
        for scaled in (False, True)
    }
    for minibatch in (16, 64):
        fresh = found[1, minibatch, False].mean()
        assert torch.equal(found[1, minibatch, False], found[1, minibatch, True])
        unscaled, scaled = found[16, minibatch, False], found[16, minibatch, True]
        assert fresh - unscaled.mean() > 0.3
        assert fresh - scaled.mean() < 0.02
        assert fresh - found[4, minibatch, True].mean() < 0.02
        assert bool((scaled > unscaled).all())


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
    """Sweep Rudra's n over 1, 2 and 4, with three seeds: gradients of one round of all workers make n updates."""
    for n in (1, 2, 4):
        for seed in range(3):
            run = of_softsync(n, seed)
            behind = run.updates_behind[2 * NUM_WORKERS :]
            assert fmean(behind) == pytest.approx(n * (1 - 1 / NUM_WORKERS), rel=0.1)
            assert sum(late > 2 * n for late in behind) < 0.01 * len(behind)
            assert run.num_updates == len(run.updates_behind) * n // NUM_WORKERS
