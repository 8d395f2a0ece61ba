"""Group G: tuners that set momentum, learning rate and staleness while the training goes on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.config.load import load_train_config
from orchestray.search.methods.base import Become, Proposal
from orchestray.search.methods.population.omnivore import Omnivore
from orchestray.search.replay import config_at
from orchestray.search.simulate import Simulated, simulate
from orchestray.search.spaces.dimensions import Choice, Dimension
from orchestray.search.trials.training import TrainingTrial
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
    ours = np.median([steps_to(1e-2, "yellowfin", 1.0, seed) for seed in range(3)])
    adam = np.median([steps_to(1e-2, "adam", 1e-3, seed) for seed in range(3)])
    record_property("steps to 1e-2: yellowfin", float(ours))
    record_property("steps to 1e-2: adam", float(adam))
    assert ours <= adam


MOMENTUM, LR = "train.optimizer.momentum", "train.optimizer.lr"
NUM_STEPS, EVERY, PROBE = 48, 16, 4


def retuned(space: dict[str, Dimension]) -> tuple[Omnivore, Simulated]:
    """One training of `digits` whose values are tried again every 16 steps."""
    train = {"batch_size": 256, "steps": NUM_STEPS, "optimizer": {"type": "sgd", "lr": 0.1}}
    base = load_train_config({"name": "omnivore", "task": {"type": "digits", "hidden": [16]}, "train": train})
    trials: dict[int, TrainingTrial] = {}

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial not in trials:
            trials[proposal.trial] = TrainingTrial(config_at(base, proposal.changes))
        return -trials[proposal.trial].advance(step).metrics["loss"]

    def become(trial: int, decision: Become) -> None:
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
