"""A search that loses a whole machine goes on with the others: no trial is lost, none is written down twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.cli import Running, read_lines
from support.placed_task import FIRST_HELD, HELD_AT
from support.ray_cluster import ray_cluster

_TRIALS = list(range(6))
_STEPS = 160


def config(folder: Path, hold: Path) -> dict[str, Any]:
    train = {"batch_size": 8, "steps": _STEPS, "optimizer": {"type": "sgd", "lr": 0.1}}
    task = {"type": "support.placed_task:PlacedTask", "trial": 0, "folder": str(folder), "hold": str(hold)}
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


def held(folder: Path) -> set[str]:
    """The machines on which a trial is held."""
    places = [place for place in folder.iterdir() if int(place.name.partition("-")[0]) >= FIRST_HELD]
    told = [place.read_text(encoding="utf-8").split() for place in places]
    return {line[0] for line in told if len(line) == 2 and int(line[1]) == HELD_AT}


def test_a_search_goes_on_when_the_machine_of_a_trial_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    folder, hold, path = tmp_path / "places", tmp_path / "hold", tmp_path / "runs" / "lost"
    folder.mkdir()
    hold.touch()
    file = tmp_path / "lost.yaml"
    file.write_text(json.dumps(config(folder, hold)), encoding="utf-8")
    with ray_cluster(num_cpus=1, num_nodes=2) as cluster:
        running = Running(
            ["search", file, "--runs-dir", tmp_path / "runs", "--quiet", "--address", cluster.gcs_address], path
        )
        try:
            running.until(
                "a trial held on each machine, and one that has ended",
                lambda: len(held(folder)) == 2 and read_lines(path / "trials.jsonl"),
            )
            ended = read_lines(path / "trials.jsonl")
            cluster.kill_last_node()
            hold.unlink()
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
