"""The autotuner keeps the fastest algorithm for each shape, within a memory limit, also for the next process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.survey.operators.autotuner import ALGORITHMS, Autotuner, extra_bytes

X, WEIGHT = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3)


def slow(x: Tensor, weight: Tensor) -> Tensor:
    time.sleep(0.02)
    return functional.conv2d(x, weight)


def hungry(x: Tensor, weight: Tensor) -> Tensor:
    aside = torch.zeros(10_000_000, dtype=torch.uint8)
    return functional.conv2d(x, weight) + aside[0]


def depends_on_size(x: Tensor, weight: Tensor) -> Tensor:
    return slow(x, weight) if weight.shape[-1] > 3 else functional.conv2d(x, weight)


def test_the_choice_is_the_fastest_and_another_for_another_kernel() -> None:
    def steady(x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(0.005)
        return functional.conv2d(x, weight)

    tuner = Autotuner(algorithms={"slow": slow, "steady": steady, "depends": depends_on_size})
    assert tuner.choice(X, WEIGHT) == "depends"
    assert tuner.choice(X, torch.ones(3, 2, 5, 5)) == "steady"
    torch.testing.assert_close(tuner(X, WEIGHT), functional.conv2d(X, WEIGHT))


def test_an_algorithm_over_the_limit_is_left_out_and_none_within_it_is_an_error() -> None:
    assert extra_bytes(hungry, X, WEIGHT) >= 10_000_000
    algorithms = {"hungry": hungry, "slow": slow}
    assert Autotuner(algorithms=algorithms).choice(X, WEIGHT) == "hungry"
    assert Autotuner(algorithms=algorithms, limit_bytes=1_000_000).choice(X, WEIGHT) == "slow"
    with pytest.raises(ValueError, match="no algorithm keeps to 1000 bytes"):
        Autotuner(algorithms={"hungry": hungry}, limit_bytes=1000).choice(X, WEIGHT)


def test_a_choice_is_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    asked: list[str] = []

    def counting(x: Tensor, weight: Tensor) -> Tensor:
        asked.append("again")
        return functional.conv2d(x, weight)

    assert Autotuner(file=file, algorithms={"counting": counting}).choice(X, WEIGHT) == "counting"
    times = len(asked)
    assert Autotuner(file=file, algorithms={"counting": counting}).choice(X, WEIGHT) == "counting"
    assert len(asked) == times > 0


def test_shapes_that_an_algorithm_does_not_take_leave_the_others() -> None:
    weight = torch.ones(3, 2, 3, 5)
    tuner = Autotuner()
    torch.testing.assert_close(tuner(X, weight), functional.conv2d(X, weight))
    assert tuner.choice(X, weight) in ALGORITHMS
