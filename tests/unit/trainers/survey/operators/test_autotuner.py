"""The autotuner keeps the fastest algorithm for each shape, within a memory limit, also for the next process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.survey.operators import autotuner
from orchestray.trainers.survey.operators.autotuner import ALGORITHMS, Algorithm, Autotuner, extra_bytes

X, WEIGHT = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight)


def steady(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight)


def seconds(algorithm: Algorithm, _x: Tensor, weight: Tensor) -> float:
    """Return the seconds that each algorithm of these tests is said to take: `convolve` is slow for large kernels."""
    of_small = {convolve: 1.0, steady: 2.0, hungry: 0.5}
    return of_small[algorithm] if algorithm is not convolve or weight.shape[-1] <= 3 else 9.0


def hungry(x: Tensor, weight: Tensor) -> Tensor:
    aside = torch.zeros(10_000_000, dtype=torch.uint8, device=x.device)
    return functional.conv2d(x, weight) + aside[0]


def test_the_choice_is_the_fastest_and_another_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "time_s", seconds)
    tuner = Autotuner(algorithms={"steady": steady, "convolve": convolve})
    assert tuner.choice(X, WEIGHT) == "convolve"
    assert tuner.choice(X, torch.ones(3, 2, 5, 5)) == "steady"
    torch.testing.assert_close(tuner(X, WEIGHT), functional.conv2d(X, WEIGHT))


def test_an_algorithm_over_the_limit_is_left_out_and_none_within_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autotuner, "time_s", seconds)
    assert extra_bytes(hungry, X, WEIGHT) >= 10_000_000
    algorithms = {"hungry": hungry, "steady": steady}
    assert Autotuner(algorithms=algorithms).choice(X, WEIGHT) == "hungry"
    assert Autotuner(algorithms=algorithms, limit_bytes=1_000_000).choice(X, WEIGHT) == "steady"
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
