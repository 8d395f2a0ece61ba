"""The survey's servers in a hierarchy (table D), as whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import digits, furthest


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task() -> Any:
    return digits(hidden=[24, 16])


@pytest.mark.parametrize("shards", [1, 2])
def test_hierarchical_ps_in_lock_step_is_the_flat_server_and_the_single_process(shards: int, tmp_path: Path) -> None:
    exchange = {"shards": shards}
    flat = train_central(task, central_settings(4, exchange, steps=6), tmp_path / "flat")
    tree = train_central(task, central_settings(4, {**exchange, "groups": 2}, steps=6), tmp_path / "tree")
    one = train_laid_out(task, layout_settings(steps=6))
    assert furthest(tree.weights, flat.weights) <= 1e-12
    assert furthest(tree.weights, one.weights) <= 1e-12
    assert tree.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    # What goes through the shards is for leaves, not for workers: half as many, less the first values and the last.
    assert tree.outcome.bytes_sent == flat.outcome.bytes_sent == 0  # the hosts count, and the driver adds up


@pytest.mark.parametrize("significance", [0.0, 0.02])
def test_geo_distributed_servers_learn_as_well_with_only_significant_changes_between_them(
    significance: float, tmp_path: Path
) -> None:
    exchange = {"consistency": "asynchronous", "groups": 2, "significance": significance}
    optimizer = {"type": "sgd", "lr": 0.1}
    settings = central_settings(4, exchange, steps=None, epochs=4, batch_size=64, optimizer=optimizer)
    found = train_central(task, settings, tmp_path)
    assert found.outcome.samples == 4 * len(task().dataset("train"))
    assert found.lines[-1]["accuracy"] > 0.6
