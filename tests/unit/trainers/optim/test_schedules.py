"""Learning rates by their formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.optim.schedules import lr_at
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits


def rates(schedule: dict[str, Any], last: int, total_steps: int | None = None) -> list[float]:
    return [lr_at(schedule, 2.0, step, total_steps) for step in range(1, last + 1)]


def test_constant_is_the_base_rate() -> None:
    assert rates({"type": "constant"}, 5) == [2.0] * 5


def test_step_multiplies_by_gamma_every_so_many_steps() -> None:
    assert rates({"type": "step", "every_steps": 2, "gamma": 0.5}, 6) == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]


def test_cosine_begins_at_the_full_rate_and_would_end_after_the_last_step() -> None:
    expected = [1.0 + math.cos(math.pi * n / 4) for n in range(4)]
    assert rates({"type": "cosine"}, 4, total_steps=4) == pytest.approx(expected, rel=1e-15)
    assert rates({"type": "cosine", "min_factor": 0.25}, 6, total_steps=4)[4:] == [0.5, 0.5]


def test_linear_goes_straight_to_its_end() -> None:
    assert rates({"type": "linear"}, 5, total_steps=4) == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates({"type": "linear", "end_factor": 0.5}, 5, total_steps=4) == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_warmup_is_a_straight_line_to_the_full_rate_and_the_schedule_follows_it() -> None:
    warm = [0.5, 1.0, 1.5, 2.0]
    assert rates({"type": "constant", "warmup_steps": 4}, 6) == [*warm, 2.0, 2.0]
    step = {"type": "step", "warmup_steps": 4, "every_steps": 1, "gamma": 0.5}
    assert rates(step, 7) == [*warm, 2.0, 1.0, 0.5]
    assert rates({"type": "linear", "warmup_steps": 4}, 8, total_steps=8) == [*warm, 2.0, 1.5, 1.0, 0.5]
    cosine = rates({"type": "cosine", "warmup_steps": 4}, 8, total_steps=8)
    assert cosine[:4] == warm
    assert cosine[4:] == pytest.approx([1.0 + math.cos(math.pi * n / 4) for n in range(4)], rel=1e-15)


def test_a_schedules_own_total_goes_before_that_of_the_run() -> None:
    assert lr_at({"type": "linear", "total_steps": 2}, 2.0, 2, 100) == 1.0
    assert lr_at({"type": "linear", "total_steps": None}, 2.0, 2, 2) == 1.0


@given(
    kind=st.sampled_from(["constant", "step", "cosine", "linear"]),
    warmup_steps=st.integers(0, 20),
    total_steps=st.integers(1, 50),
    step=st.integers(1, 100),
)
def test_every_rate_is_between_zero_and_the_base(kind: str, warmup_steps: int, total_steps: int, step: int) -> None:
    schedule = {"type": kind, "warmup_steps": warmup_steps, "every_steps": 3, "gamma": 0.7}
    assert 0.0 <= lr_at(schedule, 2.0, step, total_steps) <= 2.0


@pytest.mark.parametrize(
    ("schedule", "step", "message"),
    [
        ({"type": "constant"}, 0, "first step is step 1"),
        ({"type": "cosine"}, 1, "needs to know how many steps"),
        ({"type": "cyclic"}, 1, "Unknown schedule 'cyclic'"),
    ],
)
def test_what_has_no_rate_is_refused(schedule: dict[str, Any], step: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lr_at(schedule, 1.0, step)


OWN_SCHEDULE = """
import torch


class Halves(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, every=2):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]


class NoSchedule:
    pass
"""


def test_a_class_of_torch_gives_the_rates_that_it_gives_an_optimizer_of_torch() -> None:
    schedule = {"type": "torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", "T_0": 4, "eta_min": 0.1}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, eta_min=0.1)
    wanted = []
    for _ in range(10):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [lr_at(schedule, 2.0, step) for step in range(1, 11)] == wanted
    assert lr_at(schedule, 2.0, 3) == wanted[2], "rates of earlier steps are known as well"


def test_a_class_of_a_user_follows_the_warm_up() -> None:
    schedule = {"type": "own:Halves", "file": "/nowhere/own.py", "source": OWN_SCHEDULE, "every": 1, "warmup_steps": 2}
    assert [lr_at(schedule, 2.0, step) for step in range(1, 6)] == [1.0, 2.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"type": "own:NoSchedule", "source": OWN_SCHEDULE, "file": "/own.py"}, "NoSchedule is not a torch.optim.lr_s"),
        (
            {"type": "torch.optim.lr_scheduler:StepLR"},
            "StepLR cannot be used with these .*; it takes step_size",
        ),
        ({"type": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "learns of nothing but the step"),
        (
            {"type": "torch.optim.lr_scheduler:CosineAnnealingLR", "T_max": 0},
            "CosineAnnealingLR cannot be used with these arguments: .*by zero",
        ),
        (
            {"type": "torch.optim.lr_scheduler:OneCycleLR", "max_lr": 1.0, "total_steps": 5},
            "OneCycleLR moves momentum as well, .*; give it cycle_momentum: false",
        ),
        ({"type": "no_such_module:Halves"}, "there is no module no_such_module for train.lr_schedule.type"),
    ],
)
def test_a_class_that_gives_no_rates_is_refused_in_a_sentence(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(OrchestrayError, match=message):
        lr_at(schedule, 1.0, 1)


def test_a_class_that_ends_before_the_run_does_is_refused_before_the_first_step(tmp_path: Path) -> None:
    schedule = {"type": "torch.optim.lr_scheduler:OneCycleLR", "max_lr": 0.5, "total_steps": 5, "cycle_momentum": False}
    message = r"OneCycleLR has no rate after 6 steps, and 7 are wanted .*; give it more steps, or train fewer"
    with pytest.raises(OrchestrayError, match=message):
        train_laid_out(few_digits, layout_settings(lr_schedule=schedule, steps=8))
    with pytest.raises(OrchestrayError, match=message):
        train_central(few_digits, central_settings(2, {}, lr_schedule=schedule, steps=8), tmp_path / "run")
