"""Shares that a worker gives up midway, because the worker that repeats them was faster."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from support.central_run import CentralRun, central_settings, train_central
from support.patience import PATIENCE_S
from support.training import digits, few_digits, same_bits

STEPS = 6
PASSES = 4
"""Passes of a share: its micro-batches."""
DELAY = ({"kind": "delay", "role": "worker", "rank": 0, "at_step": 1, "factor": 60.0},)
"""The first worker takes a minute longer for each share than the others for all, if it is not cancelled."""


def plain(tmp_path: Path, task: Any = few_digits) -> CentralRun:
    return train_central(task, central_settings(2, steps=STEPS), tmp_path / "plain")


def redundant(tmp_path: Path, task: Any = few_digits, faults: Any = (), **exchange: Any) -> CentralRun:
    settings = central_settings(3, {"backup_workers": 1, **exchange}, steps=STEPS)
    return train_central(task, replace(settings, faults=faults), tmp_path / "redundant")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_slow_twin_is_cancelled_every_share_counts_once_and_the_result_has_the_bits_of_the_run_without(
    tmp_path: Path, shards: int
) -> None:
    expected, found = plain(tmp_path), redundant(tmp_path, faults=DELAY, shards=shards)
    assert found.workers[0]["cancelled"] >= 1
    assert found.workers[0]["shares"] == 0  # it never came to the end of one
    assert [line["step"] for line in found.lines if "split" not in line] == list(range(1, STEPS + 1))
    assert found.outcome.samples == expected.outcome.samples
    assert found.outcome.summary["dropped_copies"] >= 1
    assert same_bits(found.weights, expected.weights)
    assert found.losses == expected.losses


class Stuck(nn.Module):
    """A layer in which the thread that comes first is stuck until another one is several shares ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.another_is_ahead = threading.Event()
        self.passes = Counter[int]()
        self.stuck: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        this = threading.get_ident()
        self.passes[this] += self.training
        if self.stuck is None and self.training:
            self.stuck = this
            self.another_is_ahead.wait(PATIENCE_S)
        elif this != self.stuck and self.passes[this] >= PASSES * (STEPS - 2):
            self.another_is_ahead.set()
        return x


def test_a_share_is_cancelled_between_two_layers_and_leaves_no_trace_in_the_statistics(tmp_path: Path) -> None:
    """Have one worker stuck in the first layer that is behind the normalisation of a batch."""
    stuck, behind = Stuck(), Counter[int]()

    class Reached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            behind[threading.get_ident()] += self.training
            return x

    def task(*layers: nn.Module) -> Any:
        made = digits(hidden=[8], batch_norm=True)
        build = made.build_model
        made.build_model = lambda: nn.Sequential(build(), *layers)  # type: ignore[method-assign]
        return made

    found = redundant(tmp_path, lambda: task(_Held(stuck), Reached()))
    expected = plain(tmp_path, lambda: task(nn.Identity(), nn.Identity()))
    assert stuck.stuck is not None
    assert behind[stuck.stuck] < stuck.passes[stuck.stuck]  # the next layer was not begun
    assert sum(worker["cancelled"] for worker in found.workers) >= 1
    assert same_bits(found.weights, expected.weights)


class _Held(nn.Module):
    """A layer of each worker's own model, which passes through one that all share."""

    def __init__(self, shared: Stuck) -> None:
        super().__init__()
        self._shared = [shared]

    def forward(self, x: Tensor) -> Tensor:
        self._shared[0].train(self.training)
        passed: Tensor = self._shared[0](x)
        return passed
