"""`engine: ray_train`: what becomes of a run when its workers die, fail, or find no place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

import orchestray
from orchestray.platform.errors import ClusterError, OrchestrayError, TrainingError
from orchestray.platform.gang import placement
from orchestray.platform.gang.pool import make_room
from support.cli import read_lines
from support.slow_digits import slowly
from support.under_way import UnderWay, assert_same_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
LONG = ["train.epochs=20", "task.hidden=[16]", "checkpoint.every_steps=100"]

_TASK = """
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from orchestray.platform.data.tensors import stack_columns, to_tensor


class Fails:
    def __init__(self, at=3):
        self.at, self.passes = at, 0

    def build_model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        points = np.linspace(-1, 1, 64)
        return pa.table({"a": points, "b": points**2, "y": points})

    def to_batch(self, columns):
        return {"inputs": stack_columns(columns, ["a", "b"]).float(), "targets": to_tensor(columns["y"]).float()}

    def loss(self, outputs, batch):
        self.passes += 1
        if dist.get_rank() == 1 and self.passes > self.at:
            raise LookupError("the second worker has had enough")
        return nn.functional.mse_loss(outputs[:, 0], batch["targets"])

    def metrics(self, outputs, batch):
        return {"error": (outputs[:, 0] - batch["targets"]).abs().mean()}
"""


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


def start(runs: Path, *overrides: str) -> tuple[UnderWay, Path]:
    """A run that is slow once it has a checkpoint, and the file to remove when it need no longer be."""
    slowed, slow = slowly(runs, quick=100)
    return UnderWay(DIGITS, runs, [*LONG, "engine=ray_train", *slowed, *overrides], name="digits"), slow


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two workers, by the other engine."""
    return orchestray.train(DIGITS, overrides=LONG, runs_dir=tmp_path_factory.mktemp("whole")).path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process makes its temporary directories."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_sigkill_of_a_worker_goes_on_from_the_checkpoint_to_the_same_bits(
    whole: Path, tmp_path: Path, temporary: Path
) -> None:
    running, slow = start(tmp_path)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    assert len(list(temporary.glob("orchestray-ray-train-*"))) == 1
    before = running.actors()
    running.kill(0)  # the one that saves and reports
    running.until("other workers", lambda: len(running.actors()) == 2 and running.actors() != before)
    slow.unlink()
    running.finish()
    assert_same_run(whole, running.path)
    assert running.result()["restarts"] == 1
    assert [event["rank"] for event in running.events("worker_lost")] == [0]
    assert running.events("recovered")[0]["step"] > running.events("checkpoint_saved")[0]["step"]
    names = [event["event"] for event in running.events()]
    assert names[0] == "started"
    assert names.index("worker_lost") < names.index("recovered") < names.index("finished")
    assert sorted(event["rank"] for event in running.events("worker_started")) == [0, 0, 1, 1]
    assert running.actors() == {}
    assert list(temporary.glob("orchestray-ray-train-*")) == []


def test_more_losses_than_max_restarts_end_the_run_and_say_why(cluster: Cluster, tmp_path: Path) -> None:
    running, slow = start(tmp_path, "max_restarts=0")
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    running.kill(1)
    slow.unlink()
    with pytest.raises(TrainingError, match=r"^Worker 1 died \(.*\) after 0 recoveries, and max_restarts is 0\."):
        running.finish()
    assert (running.result()["status"], running.result()["restarts"]) == ("failed", 0)


def test_a_users_error_in_one_worker_ends_the_run_at_once_with_that_error(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(_TASK)
    config = {
        "name": "fails",
        "task": {"type": f"{tmp_path}/fails.py:Fails"},
        "train": {"batch_size": 8, "epochs": 1000, "optimizer": {"type": "sgd", "lr": 0.01}},
        "strategy": {"network": {"data": 2}},
        "engine": "ray_train",
    }
    with pytest.raises(OrchestrayError, match="the second worker has had enough"):
        orchestray.train(config, runs_dir=tmp_path)
    result = json.loads((tmp_path / "fails" / "result.json").read_text())
    assert (result["status"], result["restarts"]) == ("failed", 0)
    assert "the second worker has had enough" in result["error"]
    events = read_lines(tmp_path / "fails" / "events.jsonl")
    assert [event["rank"] for event in events if event["event"] == "worker_failed"] == [1]
    assert [event["event"] for event in events if event["event"] == "worker_lost"] == []


def test_an_error_before_the_workers_have_met_does_not_leave_the_others_waiting(
    cluster: Cluster, tmp_path: Path
) -> None:
    built = "if dist.get_rank() == 1:\n            raise LookupError('not here')\n        return nn.Linear(2, 1)"
    (tmp_path / "fails.py").write_text(_TASK.replace("return nn.Linear(2, 1)", built))
    config = {
        "name": "fails",
        "task": {"type": f"{tmp_path}/fails.py:Fails"},
        "train": {"batch_size": 8, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.01}},
        "strategy": {"network": {"data": 2}},
        "engine": "ray_train",
    }
    with pytest.raises(OrchestrayError, match="not here"):
        orchestray.train(config, runs_dir=tmp_path)


def test_a_worker_that_is_killed_on_purpose_is_killed_once(cluster: Cluster, tmp_path: Path) -> None:
    """Though all workers begin again, two steps before it."""
    short = ["train.epochs=1", "checkpoint.every_steps=2"]
    faults = ["engine=ray_train", "allow_faults=true", "faults=[{kill: worker/1, at_step: 5}]"]
    orchestray.train(DIGITS, overrides=short, runs_dir=tmp_path, name="whole")  # the other engine's: the same bits
    run = orchestray.train(DIGITS, overrides=[*short, *faults], runs_dir=tmp_path, name="killed")
    assert run.result["restarts"] == 1
    killed = [event for event in run.events() if event["event"] == "fault"]
    assert [(event["rank"], event["at_step"]) for event in killed] == [(1, 5)]
    assert_same_run(run.path, tmp_path / "whole")


def test_more_workers_than_the_cluster_has_room_for_are_refused_with_another_way(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=r"cannot place 64 worker\(s\) with 1 CPU each.*engine: actors"):
        orchestray.train(
            DIGITS, overrides=["engine=ray_train", "strategy.network.data=64"], runs_dir=tmp_path, name="many"
        )


def test_a_busy_cluster_is_given_up_with_what_is_free(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(cluster)
    taken = placement_group([{"CPU": cluster.resources()["CPU"]}])
    assert taken.wait(60)
    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 1.0)
    try:
        with pytest.raises(ClusterError, match="of which 0 CPU and 0 GPU are free"):
            orchestray.train(DIGITS, overrides=["engine=ray_train"], runs_dir=tmp_path, name="patient")
    finally:
        remove_placement_group(taken)
