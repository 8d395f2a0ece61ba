"""Project Adam through Ray: servers that multiply factors are killed, and their copies go on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import orchestray
from orchestray.platform.actors.pool import make_room
from support.cli import read_lines

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

CONFIG = Path(__file__).parents[2] / "configs" / "train" / "digits-project-adam.yaml"
STEPS = 90


@pytest.mark.slow
def test_copies_of_servers_that_get_factors_take_over_and_no_step_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    kills = [{"kill": f"parameter_server/{shard}", "at_step": 20 + 20 * shard} for shard in range(2)]
    overrides = ["train.epochs=2", "allow_faults=true", f"faults={kills}"]
    run = orchestray.train(CONFIG, overrides=overrides, runs_dir=tmp_path, name="adam")
    make_room(cluster)
    assert [event["rank"] for event in read_lines(run.path / "events.jsonl") if event["event"] == "worker_lost"] == [
        0,
        1,
    ]
    assert {"trainers.ps.protocol.FactorCapture", "trainers.ps.durability.Backup"} <= set(run.result["parts"])
    losses = [line["loss"] for line in read_lines(run.path / "metrics.jsonl") if "split" not in line]
    assert len(losses) == STEPS
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
