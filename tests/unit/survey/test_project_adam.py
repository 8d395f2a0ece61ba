"""Group C: Project Adam, whose servers multiply the factors of fully connected layers (Chilimbi et al. 2014)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.staged_run import staged_settings, train_staged
from support.training import digits, furthest

SGD = {"type": "sgd", "lr": 0.05, "momentum": 0.9}


def task() -> Any:
    return digits(model="cnn", hidden=[4, 8])


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_a_replica_in_stages_that_sends_factors_is_the_single_process(tmp_path: Path, consistency: str) -> None:
    exchange = {"consistency": consistency, "factors": "always", "shards": 4}
    found = train_staged(task, staged_settings({"data": 1, "pipeline": 2}, exchange, steps=4, optimizer=SGD), tmp_path)
    wanted = train_laid_out(task, layout_settings(steps=4, optimizer=SGD))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    assert found.losses == pytest.approx(wanted.losses, rel=0, abs=1e-12)


def test_replicas_in_stages_that_send_factors_and_never_wait_reach_the_loss_of_the_single_process(
    tmp_path: Path,
) -> None:
    plain = {"steps": 30, "optimizer": {"type": "sgd", "lr": 0.05}, "batch_size": 48}
    exchange = {"consistency": "asynchronous", "factors": "always"}
    found = train_staged(task, staged_settings({"data": 2, "pipeline": 2}, exchange, **plain), tmp_path)
    wanted = train_laid_out(task, layout_settings(**plain))
    assert sum(found.losses[-10:]) <= 1.2 * sum(wanted.losses[-10:])
    assert sum(found.losses[-10:]) < sum(found.losses[:10])


@pytest.mark.parametrize("shards", [1, 2])
def test_workers_with_whole_networks_that_send_factors_are_the_single_process_and_send_less(
    tmp_path: Path, shards: int
) -> None:
    def wide() -> Any:
        return digits(hidden=[256])

    settings = central_settings(2, {"shards": shards, "factors": "auto"}, steps=4, optimizer=SGD)
    found = train_central(wide, settings, tmp_path)
    wanted = train_laid_out(wide, layout_settings(steps=4, optimizer=SGD))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    # Of m = 2 workers, each with N = 12 samples: m N (out + in) values instead of m out in, once for each server that
    # has a part of the layer. The last layer's factors, 12 (10 + 256) values, would be more than its gradient.
    workers, samples, layer = 2, 12, (64, 256)
    table = 8 * 4 + 8 * 2 * 3  # of a layer, and of the three other parameters
    if shards == 1:
        saved = math.prod(layer) * 8 - (samples * sum(layer) * 8 + table)
        assert [one["saved_bytes"] for one in found.workers] == [4 * saved] * workers
    else:
        whole = 8 * sum(parameter.numel() for parameter in wide().build_model().parameters())
        assert sum(one["saved_bytes"] for one in found.workers) > 0.5 * workers * 4 * whole
