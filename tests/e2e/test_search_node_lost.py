"""A search that loses a whole machine goes on with the others: no trial is lost, none is written down twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.cli import Running, read_lines
from support.ray_cluster import ray_cluster

_TRIALS = list(range(6))
_STEPS = 160
"""Enough that a trial which was seen in its first half is still under way when its machine is killed."""


def config(folder: Path) -> dict[str, Any]:
    train = {"batch_size": 8, "steps": _STEPS, "optimizer": {"type": "sgd", "lr": 0.1}}
    task = {"type": "support.placed_task:PlacedTask", "trial": 0, "folder": str(folder)}
    return {
        "name": "lost",
        "base": {"task": task, "train": train},
        "search": {
            "method": {"type": "grid"},
            "objective": {"metric": "accuracy"},
            "space": {"task.trial": {"type": "choice", "values": _TRIALS}},
            "parallel": 2,
        },
    }


def busy(folder: Path) -> set[str]:
    """The machines on which a trial is in its first half."""
    told = [place.read_text(encoding="utf-8").split() for place in folder.iterdir()]
    return {line[0] for line in told if len(line) == 2 and int(line[1]) <= _STEPS // 2}


def test_a_search_goes_on_when_the_machine_of_a_trial_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    folder, path = tmp_path / "places", tmp_path / "runs" / "lost"
    folder.mkdir()
    file = tmp_path / "lost.yaml"
    file.write_text(json.dumps(config(folder)), encoding="utf-8")
    with ray_cluster(num_cpus=1, num_nodes=2) as cluster:
        running = Running(
            ["search", file, "--runs-dir", tmp_path / "runs", "--quiet", "--address", cluster.gcs_address], path
        )
        try:
            running.until(
                "a trial under way on each machine, and one that has ended",
                lambda: len(busy(folder)) == 2 and read_lines(path / "trials.jsonl"),
            )
            ended = read_lines(path / "trials.jsonl")
            cluster.kill_last_node()
            status, _, stderr = running.finish()
        finally:
            running.process.kill()
    assert status == 0, stderr
    lines = read_lines(path / "trials.jsonl")
    assert lines[: len(ended)] == ended
    assert sorted(line["config"]["task.trial"] for line in lines) == _TRIALS
    assert {(line["status"], line["steps"]) for line in lines} == {("succeeded", _STEPS)}
    processes = Counter(place.name.partition("-")[0] for place in folder.iterdir())
    assert sorted(processes.values())[-2:] == [1, 2], "the trial of the lost machine, and no other, began again"
    assert (path / "best" / "model").is_dir()
