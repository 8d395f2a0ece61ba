"""`engine: ray_train`: what becomes of a run when its workers die, fail, or find no place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

import orchestray
from orchestray.platform.actors import placement
from orchestray.platform.actors.pool import make_room
from orchestray.platform.errors import ClusterError, OrchestrayError
from support.cli import read_lines
from support.held_task import held
from support.slow_digits import slowly
from support.under_way import UnderWay, assert_same_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
LONG = ["train.epochs=3", "task.hidden=[16]", "checkpoint.every_steps=50"]
KILLED_AT = 62

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


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where this process makes its temporary directories."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_a_worker_that_is_killed_is_killed_once_and_all_go_on_from_the_checkpoint_to_the_same_bits(
    cluster: Cluster, tmp_path: Path, temporary: Path
) -> None:
    """Kill the one that saves and reports, once, though all workers begin again some steps before it."""
    whole = orchestray.train(DIGITS, overrides=LONG, runs_dir=tmp_path, name="whole").path  # by the other engine
    faults = ["allow_faults=true", f"faults=[{{kill: worker/0, at_step: {KILLED_AT}}}]"]
    slowed, slow = slowly(tmp_path, quick=50, share=1.0)  # the checkpoint is there before that step
    running = UnderWay(DIGITS, tmp_path, [*LONG, "engine=ray_train", *faults, *slowed], name="digits")

    def storages() -> list[Path]:
        return list(temporary.glob("orchestray-ray-train-*"))

    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    assert len(storages()) == 1
    slow.unlink()
    running.finish()
    assert_same_run(whole, running.path)
    assert running.result()["restarts"] == 1
    assert 0 < running.result()["goodput"] < 1
    killed = running.events("fault")
    assert [(event["rank"], event["at_step"]) for event in killed] == [(0, KILLED_AT)]
    assert [event["rank"] for event in running.events("worker_lost")] == [0]
    assert running.events("recovered")[0]["step"] > running.events("checkpoint_saved")[0]["step"]
    names = [event["event"] for event in running.events()]
    assert names[0] == "started"
    assert names.index("worker_lost") < names.index("recovered") < names.index("finished")
    assert sorted(event["rank"] for event in running.events("worker_started")) == [0, 0, 1, 1]
    assert running.actors() == {}
    assert storages() == []


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a run of `held` that nothing disturbs, by the other engine."""
    runs = tmp_path_factory.mktemp("undisturbed")
    return orchestray.train(held(runs, "synchronized"), runs_dir=runs, name="whole").path


@pytest.mark.slow
def test_a_stopped_worker_is_killed_once_it_has_been_silent_for_the_time_allowed_and_all_begin_again(
    undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    running = UnderWay(held(tmp_path, "synchronized"), tmp_path, ["engine=ray_train", "hang_timeout_s=1.5"], name="run")
    running.until("both in the validation", lambda: len(list(tmp_path.glob("held-*"))) == 2)
    running.stop(0)
    (tmp_path / "hold").unlink()
    running.finish()
    assert_same_run(undisturbed, running.path)
    (lost,) = running.events("worker_lost")
    assert (lost["rank"], lost["cause"]) == (0, "it did not answer for 1.5 s: it was stopped, or starved")
    assert "held_task.py" in (running.path / lost["stacks"]).read_text()
    assert running.result()["restarts"] == 1
    assert 0 < running.result()["goodput"] < 0.9


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_a_batch_is_killed_and_not_the_one_that_waits_for_it(
    undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "stick").touch()
    patience = ["stall_timeout_s=1.5", "report_hang_s=0.5"]
    running = UnderWay(held(tmp_path, "synchronized"), tmp_path, ["engine=ray_train", *patience], name="run")
    running.finish()
    assert_same_run(undisturbed, running.path)
    (lost,) = running.events("worker_lost")
    assert lost["cause"].startswith("it made no progress for ")
    assert "_stick (" in (running.path / lost["stacks"]).read_text()
    reported = {f"worker {lost['rank']}": "working", f"worker {1 - lost['rank']}": "waiting"}
    assert reported in [event["processes"] for event in running.events("no_progress")]


@pytest.mark.slow
def test_workers_that_wait_for_each_other_without_end_begin_again_with_their_stacks_saved(
    undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "miss").touch()
    overrides = ["engine=ray_train", "stall_timeout_s=1.5"]
    running = UnderWay(held(tmp_path, "synchronized"), tmp_path, overrides, name="run")
    running.finish()
    assert_same_run(undisturbed, running.path)
    (stalled,) = running.events("stalled")
    assert "_miss (" in "".join((running.path / name).read_text() for name in stalled["stacks"])
    assert running.events("worker_lost") == []
    assert running.result()["restarts"] == 1


def failing(folder: Path, source: str) -> dict[str, Any]:
    """Return the config of a run of two workers whose task has this source, and many steps to go."""
    (folder / "fails.py").write_text(source)
    return {
        "name": "fails",
        "task": {"type": f"{folder}/fails.py:Fails"},
        "train": {"batch_size": 8, "epochs": 1000, "optimizer": {"type": "sgd", "lr": 0.01}},
        "strategy": {"network": {"data": 2}},
        "engine": "ray_train",
    }


def test_a_users_error_in_one_worker_ends_the_run_at_once_with_that_error(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(OrchestrayError, match="the second worker has had enough"):
        orchestray.train(failing(tmp_path, _TASK), runs_dir=tmp_path)
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
    with pytest.raises(OrchestrayError, match="not here"):
        orchestray.train(failing(tmp_path, _TASK.replace("return nn.Linear(2, 1)", built)), runs_dir=tmp_path)


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
