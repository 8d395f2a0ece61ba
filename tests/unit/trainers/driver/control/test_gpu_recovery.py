"""Recovery on GPUs, whose waits report no lost peer: the driver's word ends them, and nothing undefined is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective
from support.gpu_recovery import RunOnGpus

SIZE, STEPS = 3, 5


@dataclass
class Held:
    """A state whose every update depends on all that came before."""

    step: int = objects.NO_STATE
    weights: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


def moved(weights: Tensor, total: Tensor) -> Tensor:
    return (weights * 3 + total) % 1009


def train(held: Held, collective: Collective) -> list[float]:
    """Agree on the state that is farthest ahead, and train on, as the loop does."""
    leader, steps = objects.farthest(collective, held.step)
    if len(set(steps)) > 1 or held.step == objects.NO_STATE:
        shared = objects.share_tensors(collective, {"weights": held.weights}, leader)
        held.weights = shared["weights"].clone()
        held.step = max(0, *steps)
    beside = collective.sibling("beside")
    while held.step < STEPS:
        gradient = torch.arange(4, dtype=torch.float64) * (collective.rank + 1) + held.step
        under_way = collective.start_all_reduce(gradient)
        extra = torch.tensor([float(collective.rank)], dtype=torch.float64)
        beside.all_reduce(extra)
        under_way.wait()
        held.weights = moved(held.weights, gradient + extra)
        held.step += 1
    return held.weights.tolist()


def expected() -> list[float]:
    weights = torch.zeros(4, dtype=torch.float64)
    for step in range(STEPS):
        total = sum(torch.arange(4, dtype=torch.float64) * (rank + 1) + step for rank in range(SIZE))
        weights = moved(weights, total + sum(range(SIZE)))
    return weights.tolist()


@pytest.mark.parametrize("num_seeds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_survivors_go_on_to_the_same_weights_whenever_members_die(num_seeds: int) -> None:
    wanted, killed, ended = expected(), 0, 0
    for seed in range(num_seeds):
        run = RunOnGpus(seed, SIZE, Held, train, num_deaths=1 + seed % 3, until_s=12.0)
        assert run.run() == [wanted] * SIZE, seed
        killed += run.num_killed
        ended += run.gpus.num_ended
    assert ended > num_seeds / 50, "deaths while a communicator was made, which left survivors waiting"
    assert killed > num_seeds, "deaths in the middle of the work, and not after it"
