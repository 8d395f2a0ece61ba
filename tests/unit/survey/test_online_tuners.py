"""Group G: tuners that set momentum, learning rate and staleness while the training goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.search.methods.base import Exploit, Proposal
from orchestray.search.methods.population.omnivore import Omnivore
from orchestray.search.replay import config_at
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Choice, Dimension
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.yellowfin import YellowFin
from support.virtual_training import LeastSquares, VirtualTraining


def test_yellowfin_tunes_the_momentum_to_the_square_of_root_kappa_minus_1_over_root_kappa_plus_1() -> None:
    """Minimise quadratics whose curvatures range over kappa, each seen one standard deviation from its minimum.

    There the squared norm of the gradient, by which YellowFin measures it, is the curvature: as that of a Gaussian's
    negative logarithm is in the mean (section 3.2 of the paper). Noise is small.
    """
    for kappa in (4.0, 9.0, 25.0):
        optimizer = make_optimizer("yellowfin", beta=0.99, slow_start=False)
        assert isinstance(optimizer, YellowFin)
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer.init([("weight", weight)])
        rng = np.random.default_rng(0)
        middle = math.sqrt(kappa) * 0.5 + 0.5
        for step in range(600):
            curvature = {0: 1.0, 10: kappa}.get(step % 20, middle**2)
            away = (1.0 + 1e-3 * rng.normal()) / math.sqrt(curvature)
            loss = curvature / 2 * (weight - (weight.detach() - away)).square().sum()
            optimizer.step([weight], torch.autograd.grad(loss, [weight]), 1.0)
        wanted = ((math.sqrt(kappa) - 1.0) / (math.sqrt(kappa) + 1.0)) ** 2
        assert optimizer.measured.momentum == pytest.approx(wanted, abs=0.01), kappa


def steps_to(target: float, optimizer: str, lr: float, seed: int, most: int = 4000) -> int:
    """Count the steps until a noisy quadratic has come down to `target` of its start.

    Its curvatures are 0.1 to 10 in 10 dimensions.
    """
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
    ours = np.median([steps_to(1e-2, "yellowfin", 1.0, seed) for seed in range(3)])
    adam = np.median([steps_to(1e-2, "adam", 1e-3, seed) for seed in range(3)])
    record_property("steps to 1e-2: yellowfin", float(ours))
    record_property("steps to 1e-2: adam", float(adam))
    assert ours <= adam


MOMENTUM, LR = "train.optimizer.momentum", "train.optimizer.lr"
NUM_STEPS, EVERY, PROBE = 48, 16, 4


def retuned(space: dict[str, Dimension]) -> tuple[Omnivore, Simulated]:
    """Train `digits` once, with values that are tried again every 16 steps."""
    train = {"batch_size": 256, "steps": NUM_STEPS, "optimizer": {"type": "sgd", "lr": 0.1}}
    base = load_train_config({"name": "omnivore", "task": {"type": "digits", "hidden": [16]}, "train": train})
    trials: dict[int, TrainingTrial] = {}

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial not in trials:
            trials[proposal.trial] = TrainingTrial(config_at(base, proposal.changes))
        return -trials[proposal.trial].advance(step).metrics["loss"]

    def become(trial: int, decision: Exploit) -> None:
        state = trials[decision.source].state()
        trials[trial] = TrainingTrial(config_at(base, decision.changes))
        trials[trial].load(state)

    method = Omnivore(space=space, steps_per_trial=NUM_STEPS, every_steps=EVERY, probe_steps=PROBE)
    return method, simulate(method, evaluate, on_become=become)


def test_omnivore_retunes_at_every_interval_and_ends_no_worse_than_any_fixed_value() -> None:
    values = (0.0, 0.5, 0.9)
    method, tuned = retuned({MOMENTUM: Choice(values), LR: Choice((0.02, 0.1))})
    assert [retune.step for retune in method.retunes] == list(range(PROBE, NUM_STEPS, EVERY))
    for retune in method.retunes:
        assert len(retune.scores) == 6
        assert retune.scores[retune.winner] == max(retune.scores.values())
    (winner,) = (trial for trial in tuned.trials.values() if trial.status == "succeeded")
    fixed = [
        retuned({MOMENTUM: Choice((momentum,)), LR: Choice((lr,))})[1].best.score or -math.inf
        for momentum in values
        for lr in (0.02, 0.1)
    ]
    assert (winner.score or -math.inf) >= max(fixed) - 0.02


NUM_WORKERS = 8


def of_groups(num_groups: int, lr: float, seed: int) -> tuple[float, float, float]:
    """Train by groups of workers; each group computes a whole batch together, and groups do not wait for each other.

    Return the updates a second, the loss after 16 to 32 updates above the least there is (1: as at the beginning), and
    the seconds until it stays below 5 %.
    """
    size = NUM_WORKERS // num_groups
    rng, problem = random.Random(seed), LeastSquares(seed)
    run = VirtualTraining(
        problem,
        lambda _group: max(rng.uniform(0.5, 1.5) for _ in range(size)) / size,
        num_groups,
        consistency="asynchronous",
        num_shares=1,
        batch_size=24,
        epochs=16,
        lr=lr,
    )
    run.run()
    assert mean(run.staleness[NUM_WORKERS:]) == pytest.approx(num_groups - 1, abs=0.2)
    at_s = sorted(run.step_at_s.values())
    updates_per_s = (len(at_s) - 2 * NUM_WORKERS) / (at_s[-NUM_WORKERS - 1] - at_s[NUM_WORKERS - 1])
    least, start = problem.least(), problem.loss(torch.zeros_like(run.weights))
    above = [(loss - least) / (start - least) for loss in run.losses]
    needed = 1 + max((update for update, loss in enumerate(above) if loss > 0.05), default=-1)
    return updates_per_s, mean(above[16:32]), at_s[needed] if needed < len(at_s) else math.inf


def test_omnivores_groups_trade_updates_a_second_for_loss_an_update() -> None:
    """Compare sizes of groups: the smaller they are, the fewer wait for a slow one, and the staler are updates.

    At a rate that suits one group the best in time lies between the ends. At a small one staleness does what momentum
    would (I. Mitliagkas et al., "Asynchrony begets Momentum", 2016), and groups of one worker are best.
    """
    num_groups = (1, 2, 4, 8)

    def sweep(lr: float) -> list[list[float]]:
        runs = [[of_groups(num, lr, seed) for seed in range(3)] for num in num_groups]
        return [[mean(one[place] for one in of_size) for of_size in runs] for place in range(3)]

    updates_per_s, loss, seconds = sweep(0.3)
    # The slowest of k workers, each of which takes 0.5 to 1.5 s, takes 0.5 + k / (k + 1) s in the mean.
    sizes = [NUM_WORKERS // num for num in num_groups]
    assert updates_per_s == pytest.approx([NUM_WORKERS / (0.5 + size / (size + 1)) for size in sizes], rel=0.03)
    assert updates_per_s == sorted(updates_per_s)
    assert all(more > 1.5 * fewer for fewer, more in pairwise(loss))
    assert min(seconds) == seconds[1], "two groups of four"
    _, loss, seconds = sweep(0.05)
    assert loss == sorted(loss, reverse=True)
    assert seconds == sorted(seconds, reverse=True)
