"""Modules that draw random numbers for a part of what one process draws for are named to the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.unseeded_rng import own_draws
from support.threads import run_replicas

WIDTH = 8


class Dropping(nn.Module):
    """A module that drops by a function between two layers, and says that it draws."""

    draws_random = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


class Noisy(nn.Module):
    """A module that adds noise in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.training else x


def network(between: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), between(), nn.Linear(WIDTH, WIDTH), between())


PLAN = {"0": "output", "2": "input"}


def warnings_of(between: type[nn.Module], plan: dict[str, str]) -> list[list[str]]:
    models = [network(between) for _ in range(2)]

    def run(group: Collective) -> list[str]:
        return split_model(
            models[group.rank], plan, lambda: group, group.rank, 2, example=torch.ones(4, WIDTH)
        ).warnings

    return run_replicas(2, run)


@pytest.mark.parametrize("between", [Dropping, Noisy])
def test_a_module_that_draws_for_a_part_is_named_on_every_worker(between: type[nn.Module]) -> None:
    first, second = warnings_of(between, PLAN)
    assert first == second
    [text] = first
    assert f"Module '1' ({between.__name__}) draws random numbers for a part of an activation" in text
    assert "'3'" not in text  # what it gets is whole


@pytest.mark.parametrize(
    ("between", "plan"), [(nn.Dropout, PLAN), (nn.Identity, PLAN), (Dropping, {"0": "output_gathered"})]
)
def test_what_draws_for_the_whole_is_not_warned_of(between: type[nn.Module], plan: dict[str, str]) -> None:
    assert warnings_of(between, plan) == [[], []]


def test_draws_are_told_by_the_innermost_module_and_change_nothing() -> None:
    model = nn.Sequential(network(Noisy), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found: Any = own_draws(model, torch.ones(4, WIDTH))
    assert found == {"0.1": [(4, WIDTH)], "0.3": [(4, WIDTH)]}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
