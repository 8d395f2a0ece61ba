"""A run whose workers measure the messages between them, as its result tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import orchestray
from orchestray.platform.comm.allreduce.measure import HELD_OUT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.cluster.cluster import Cluster


def test_two_workers_fit_a_latency_and_a_bandwidth_and_tell_the_error_for_messages_that_were_held_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = {
        "name": "measured",
        "task": {"type": "digits", "hidden": [16]},
        "train": {"batch_size": 64, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}},
        "strategy": {"network": {"data": 2}, "exchange": {"algorithm": "auto"}},
    }
    found = orchestray.train(config, runs_dir=tmp_path).result["exchange"]
    assert found["alpha_s"] > 0
    assert found["beta_s_per_byte"] >= 0
    assert [each["num_bytes"] for each in found["held_out"]] == list(HELD_OUT_BYTES)
    for each in found["held_out"]:
        expected_s = found["alpha_s"] + each["num_bytes"] * found["beta_s_per_byte"]
        assert each["measured_s"] > 0
        assert each["error"] == pytest.approx(expected_s / each["measured_s"] - 1)
