"""Pipelines end cleanly every time: torch's autograd threads abort some interpreter exits after distributed work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

import orchestray
from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from support.cli import read_lines
from support.patience import PATIENCE_S

CONFIG: dict[str, Any] = {
    "name": "short",
    "task": {"type": "digits", "hidden": [8, 8]},
    "train": {"batch_size": 512, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}},
    "strategy": {"network": {"pipeline": 2, "microbatches": 4, "split": "equal"}},
}


@pytest.mark.parametrize("num_runs", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_as_many_runs_end_cleanly_as_there_are(cluster: Cluster, tmp_path: Path, num_runs: int) -> None:
    processes: set[int] = set()
    for number in range(num_runs):
        run = orchestray.train(CONFIG, runs_dir=tmp_path, name=f"run-{number}")
        assert run.result["status"] == "succeeded"
        assert run.result["restarts"] == 0
        events = read_lines(tmp_path / f"run-{number}" / "events.jsonl")
        assert [event["event"] for event in events][-1] == "finished"
        processes |= {event["pid"] for event in events if event["event"] == "worker_started"}
    assert len(processes) == 2  # the same two all along: none had to be started again
    make_room(cluster)
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=PATIENCE_S
    )
    assert alive == []
