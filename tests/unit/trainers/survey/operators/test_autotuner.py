"""The fastest algorithm for a shape is that of the least measured time, within a memory limit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.survey.lab.timing import threads
from orchestray.trainers.survey.operators import autotuner
from orchestray.trainers.survey.operators.autotuner import (
    ALGORITHMS,
    Algorithm,
    KeptTimes,
    extra_bytes,
    fastest,
    tried_s,
)

X, WEIGHT = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3)
SMALL, LARGE = 3, 5
"""Sides of two kernels."""


def slow_for(side: int) -> Algorithm:
    """Return a convolution that does its work hundreds of times for kernels of this side: no clock mistakes it."""

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(300 if weight.shape[-1] == side else 1):
            out = functional.conv2d(x, weight)
        return out

    return convolve


def hungry(x: Tensor, weight: Tensor) -> Tensor:
    aside = torch.zeros(10_000_000, dtype=torch.uint8, device=x.device)
    return functional.conv2d(x, weight) + aside[0]


def test_the_fastest_has_the_least_measured_time_and_is_another_for_another_kernel() -> None:
    algorithms = {"for small": slow_for(LARGE), "for large": slow_for(SMALL)}
    for side, wanted in ((SMALL, "for small"), (LARGE, "for large")):
        times_s = tried_s(X, torch.ones(3, 2, side, side), algorithms=algorithms)
        assert all(0 < seconds < math.inf for seconds in times_s.values())
        assert fastest(times_s) == wanted == min(times_s, key=times_s.__getitem__)


def test_an_algorithm_over_the_limit_is_not_run_and_none_within_it_leaves_no_choice() -> None:
    run: list[str] = []

    def noting(x: Tensor, weight: Tensor) -> Tensor:
        if not x.is_meta:
            run.append("hungry")
        return hungry(x, weight)

    assert extra_bytes(hungry, X, WEIGHT) >= 10_000_000
    algorithms = {"hungry": noting, "torch": functional.conv2d}
    times_s = tried_s(X, WEIGHT, limit_bytes=1_000_000, algorithms=algorithms)
    assert (math.isinf(times_s["hungry"]), run) == (True, [])
    assert fastest(times_s) == "torch"
    assert math.isfinite(tried_s(X, WEIGHT, limit_bytes=20_000_000, algorithms=algorithms)["hungry"])
    assert run
    assert fastest(tried_s(X, WEIGHT, limit_bytes=1000, algorithms={"hungry": hungry})) is None
    assert fastest({}) is None


def test_shapes_that_an_algorithm_does_not_take_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "_ENOUGH_S", 0.0)
    for limit_bytes in (None, 10**9):
        times_s = tried_s(X, torch.ones(3, 2, 3, 5), limit_bytes=limit_bytes)
        assert {*times_s} == {*ALGORITHMS}
        assert math.isinf(times_s["Winograd F(2)"])
        assert fastest(times_s) not in {None, "Winograd F(2)", "Winograd F(4)"}


def test_what_ran_once_is_kept_by_all_that_its_time_depends_on_and_runs_again_for_anything_else(tmp_path: Path) -> None:
    run: set[str] = set()

    def noting(name: str, algorithm: Algorithm) -> Algorithm:
        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            if not x.is_meta:
                run.add(name)
            return algorithm(x, weight)

        return convolve

    algorithms = {name: noting(name, one) for name, one in (("torch", functional.conv2d), ("hungry", hungry))}
    algorithms["Winograd"] = noting("Winograd", ALGORITHMS["Winograd F(2)"])
    kept, flat = KeptTimes(tmp_path / "new", {"torch": "1"}), torch.ones(3, 2, 3, 5)

    def ran(x: Tensor = X, weight: Tensor = flat, limit_bytes: int | None = None, kept: KeptTimes = kept) -> set[str]:
        run.clear()
        times.append(tried_s(x, weight, limit_bytes=limit_bytes, algorithms=algorithms, kept=kept))
        return set(run)

    times: list[dict[str, float]] = []
    assert ran(limit_bytes=1_000_000) == {"torch"}  # the others need more, or do not take the shape
    assert ran() == {"hungry", "Winograd"}
    assert ran() == ran(kept=KeptTimes(kept.directory, {"torch": "1"})) == set()
    assert times[1] == times[2] == times[3]
    assert times[0]["torch"] == times[1]["torch"]
    assert math.isinf(times[1]["Winograd"])
    assert ran(limit_bytes=1_000_000) == set()
    assert times[-1] == times[0]  # what is kept does not keep to a limit for that
    assert ran(weight=torch.ones(3, 2, 5, 3)) == ran(X.double(), flat.double()) == set(algorithms)
    assert ran(kept=KeptTimes(kept.directory, {"torch": "2"})) == set(algorithms)
    with threads(torch.get_num_threads() + 1):
        assert ran() == set(algorithms)


def test_a_file_that_is_broken_and_one_that_cannot_be_written_have_all_run_again(tmp_path: Path) -> None:
    kept, algorithms = KeptTimes(tmp_path, {}), {"torch": functional.conv2d}
    tried_s(X, WEIGHT, algorithms=algorithms, kept=kept)
    (file,) = tmp_path.iterdir()
    for broken in ("", "[1]", '{"torch": "fast"}', '{"torch": [1]}'):
        file.write_text(broken, encoding="utf-8")
        assert 0 < tried_s(X, WEIGHT, algorithms=algorithms, kept=kept)["torch"] < 60
    file.unlink()
    file.mkdir()  # as a disk that is full: nothing can be written there
    assert 0 < tried_s(X, WEIGHT, algorithms=algorithms, kept=kept)["torch"] < 60
