"""A run whose workers send few of their gradient's values, as its files tell it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

import orchestray

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.cluster.cluster import Cluster

TABLE_1 = [0.75, 0.9375, 0.984375, 0.996, 0.999]
"""Sparsity of the gradient in each epoch, as Lin et al. (2018) have it."""
SIZES = [64 * 512, 512, 512 * 10, 10]
"""Values of each tensor of the network, of which the number to send is rounded up."""


def test_a_run_of_deep_gradient_compression_warms_up_by_the_papers_table_1(cluster: Cluster, tmp_path: Path) -> None:
    config = {
        "name": "warmed-up",
        "task": {"type": "digits", "hidden": [512]},
        "train": {"batch_size": 64, "steps": 12, "optimizer": {"type": "sgd", "lr": 0.1}},
        "strategy": {"network": {"data": 2}, "compression": {"type": "dgc", "warmup_steps": 8, "clip": 1.0}},
    }
    run = orchestray.train(config, runs_dir=tmp_path)
    steps = [line for line in run.metrics().to_pylist() if line["split"] is None]
    expected = [TABLE_1[min(number // 2, 4)] for number in range(12)]
    assert [line["sparsity"] for line in steps] == pytest.approx(expected, rel=0, abs=6e-4)
    sent = sum(math.ceil(size / 1000) for size in SIZES)
    assert steps[-1]["sparsity"] == pytest.approx(1 - sent / sum(SIZES), rel=0, abs=1e-12)
    # Each stage sends less than the one before it.
    by_stage = [line["bytes_sent"] for line in steps[::2]]
    assert by_stage[:5] == sorted(by_stage[:5], reverse=True)
