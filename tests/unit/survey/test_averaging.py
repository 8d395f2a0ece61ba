"""Groups C, D and F: replicas that train alone and take the mean of their weights every few steps, or once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.layouts import layout_settings, train_laid_out
from support.training import Rows, State, Trained, digits, furthest, train

MOMENTUM = {"type": "sgd", "lr": 0.1, "momentum": 0.9}


def convex_task() -> Rows:
    """Least squares: the loss is convex in the weights."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(240, 40))
    return Rows(inputs, inputs @ rng.normal(size=40) + rng.normal(size=240), lambda: nn.Linear(40, 1))


def loss_of(task: Any, state: State) -> float:
    model = task.build_model().double()
    model.load_state_dict(state)
    batch = task.to_batch(task.dataset("train"))
    with torch.no_grad():
        return float(task.loss(model(batch["inputs"].double()), batch))


def num_meetings(trained: Trained, num_parameters: int) -> int:
    """All-reduces of all parameters; what the workers tell each other beside them is smaller."""
    return sum(what == "all_reduce" and size == num_parameters for what, size in trained.calls)


def size_of(task: Any) -> int:
    return sum(parameter.numel() for parameter in task.build_model().parameters())


def averaged(task: Any, data: int, every: Any, **keys: Any) -> list[Trained]:
    chosen = {"optimizer": MOMENTUM, "steps": 12, "batch_size": 24, **keys}
    return train(task, data, exchange={"type": "averaging", "every": every}, **chosen)


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [2, 4])
def test_parallel_sgd_sends_its_weights_once_and_the_mean_is_no_worse_than_its_members_where_loss_is_convex(
    data: int,
) -> None:
    task = convex_task()
    keys = {"optimizer": {"type": "sgd", "lr": 0.02}, "steps": 20, "validate_every_steps": 20}
    members = averaged(task, data, "end", **keys)
    # The validation of the mean and the end share it.
    assert [num_meetings(member, size_of(task)) for member in members] == [1] * data
    losses = [loss_of(task, member.after) for member in members]
    mean = loss_of(task, dict(members[0].replica.model.state_dict()))
    assert np.ptp(losses) > 1e-3
    assert mean <= np.mean(losses)


def test_one_shot_averaging_takes_the_mean_of_the_members_weights_whatever_the_loss() -> None:
    members = averaged(digits(), 3, "end")
    mean = {name: torch.stack([member.after[name] for member in members]).mean(0) for name in members[0].after}
    for member in members:
        assert furthest(mean, dict(member.replica.model.state_dict())) <= 1e-15
    assert furthest(members[0].after, members[1].after) > 1e-3


# -- every few steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, 6])
def test_n_local_steps_meet_once_in_n_steps(every: int) -> None:
    task = digits()
    for member in averaged(task, 2, every):
        assert num_meetings(member, size_of(task)) == 12 // every


def test_n_local_steps_with_n_of_1_are_synchronous_sgd() -> None:
    """The weights agree to a rounding: the mean of weights is taken here, there the sum of gradients."""
    found = averaged(digits(), 3, 1)
    synchronous = train(digits(), 3, optimizer=MOMENTUM, steps=12, batch_size=24)
    assert furthest(found[0].after, synchronous[0].after) <= 1e-12


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "lr": 0.1}, MOMENTUM], ids=["plain", "momentum"])
def test_periodic_averaging_after_every_step_is_synchronous_sgd_and_else_sends_less_in_proportion(
    optimizer: dict[str, Any],
) -> None:
    task = digits()
    whole = train(task, 2, optimizer=optimizer, steps=12, batch_size=24)
    often = averaged(task, 2, 1, optimizer=optimizer)
    seldom = averaged(task, 2, 4, optimizer=optimizer)
    assert furthest(often[0].after, whole[0].after) <= 1e-12
    assert furthest(seldom[0].after, whole[0].after) > 1e-6
    told = often[0].outcome.bytes_sent - 12 * 2 * size_of(task) * 8
    assert seldom[0].outcome.bytes_sent - told == 3 * 2 * size_of(task) * 8


def test_periodic_averaging_of_up_to_64_steps_costs_digits_little_accuracy() -> None:
    curve = {}
    for every in (1, 8, 64):
        found = []
        for seed in range(3):
            keys = {"steps": 150, "validate_every_steps": 150, "batch_size": 32, "precision": "float32", "seed": seed}
            validation = averaged(digits(), 2, every, **keys)[0].outcome.final["validation"]
            assert validation is not None
            found.append(validation["accuracy"])
        curve[every] = float(np.mean(found))
    # As found: 0.95, 0.95 and 0.94; the means of three seeds differ by 0.01 by chance alone.
    assert curve[1] > 0.9
    assert min(curve.values()) > curve[1] - 0.04


# -- from lock-step to none --------------------------------------------------------------------------------------------


def test_the_consistency_spectrum_is_one_key_along_which_bytes_and_meetings_fall() -> None:
    spectrum: list[dict[str, Any]] = [
        {"type": "allreduce"},
        {"type": "averaging", "every": 2},
        {"type": "averaging", "every": 6},
        {"type": "averaging", "every": "end"},
    ]
    task = digits()
    found = [
        train_laid_out(lambda: task, layout_settings({"data": 2}, exchange, steps=12)).outcome for exchange in spectrum
    ]
    sent = [outcome.bytes_sent for outcome in found]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == len(sent)
    weights = 2 * size_of(task) * 8
    # What is told beside the weights is less than a twentieth of them, so this counts the meetings in the steps.
    assert [round(each / weights) for each in sent] == [12, 6, 2, 1]
