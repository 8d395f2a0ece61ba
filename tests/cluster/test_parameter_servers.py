"""Runs under parameter servers through Ray: kills of workers, of servers, and of servers that have a copy."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch

import orchestray
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import make_room
from orchestray.platform.run.checkpoint import load_model_tensors
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.control.attempt import Attempt
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress
from orchestray.trainers.driver.servers import driver as central_driver
from orchestray.trainers.driver.servers.driver import CentralDriver
from orchestray.trainers.driver.servers.server_kills import ServerKills
from support.central_run import central_settings
from support.cli import read_lines
from support.patience import PATIENCE_S
from support.slow_digits import slowly
from support.under_way import UnderWay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

CHECKPOINT_EVERY = 25
EPOCHS, STEPS_AN_EPOCH = 2, 45
CONFIG: dict[str, Any] = {
    "name": "servers",
    "task": {"type": "digits", "hidden": [16]},
    "train": {"batch_size": 32, "epochs": EPOCHS, "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.9}},
    "checkpoint": {"every_steps": CHECKPOINT_EVERY},
}
COPIED = {"shards": 2, "replicas": 2}
"""Servers 0 and 1 lead the two shards, 2 and 3 have the copies."""


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an uninterrupted run of one process."""
    return orchestray.train(CONFIG, runs_dir=tmp_path_factory.mktemp("whole"), name="whole").path


def strategy(**exchange: Any) -> dict[str, Any]:
    return {**CONFIG, "strategy": {"network": {"data": 2}, "exchange": {"type": "parameter_server", **exchange}}}


def begin(config: dict[str, Any], runs: Path, *overrides: str, name: str) -> tuple[UnderWay, Path]:
    """Begin a run that is slow once it has a checkpoint; return it, and the file to remove to end that."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY, share=0.05)
    running = UnderWay(config, runs, [*slowed, *overrides], name=name)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    return running, slow


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in read_lines(path / "metrics.jsonl") if "split" not in line]


def assert_equal_to(whole: Path, path: Path) -> None:
    """Assert every step once, with the loss of the single process, and its weights at the end."""
    assert losses(path) == pytest.approx(losses(whole), abs=1e-4)
    expected = load_model_tensors(str(whole / "model"))
    for name, tensor in load_model_tensors(str(path / "model")).items():
        assert torch.allclose(tensor, expected[name], atol=1e-4), name


def bytes_of_lines(run: Path) -> int:
    return sum(line.get("bytes_sent", 0) for line in read_lines(run / "metrics.jsonl"))


def test_a_killed_server_without_a_copy_goes_on_from_the_last_checkpoint(whole: Path, tmp_path: Path) -> None:
    running, slow = begin(strategy(), tmp_path, name="server")
    running.kill(0, "parameter_server")
    running.until("the loss noticed", lambda: running.events("worker_lost"))
    slow.unlink()
    running.finish()
    assert_equal_to(whole, running.path)
    assert [event["role"] for event in running.events("worker_lost")] == ["parameter_server"]
    sent = running.result()["bytes"]["sent"]  # steps that were done again may count twice, others not
    assert bytes_of_lines(running.path) <= sent < 2 * bytes_of_lines(running.path)


def test_a_killed_leaf_server_takes_the_run_back_to_the_last_checkpoint(whole: Path, tmp_path: Path) -> None:
    running, slow = begin(strategy(groups=2), tmp_path, name="leaf")
    running.kill(1, "leaf_server")
    running.until("the loss noticed", lambda: running.events("worker_lost"))
    slow.unlink()
    running.finish()
    assert [(event["role"], event["rank"]) for event in running.events("worker_lost")] == [("leaf_server", 1)]
    assert_equal_to(whole, running.path)
    assert running.result()["restarts"] == 1
    assert 0 < running.result()["goodput"] < 1


def test_a_server_killed_before_the_run_is_announced_is_replaced_as_any_other(
    whole: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(central_driver, "_SERVER_HOST", "support.dying_hosts:ServerKilledBeforeTheRun")
    run = orchestray.train(strategy(), runs_dir=tmp_path, name="early")
    assert_equal_to(whole, run.path)
    assert run.result["restarts"] == 1
    assert len([line for line in read_lines(run.path / "events.jsonl") if line["event"] == "started"]) == 1


def test_the_others_go_on_while_a_worker_is_replaced(tmp_path: Path) -> None:
    running, slow = begin(strategy(consistency="asynchronous"), tmp_path, name="others")
    running.kill(1)
    lost = running.until("the loss noticed", lambda: running.events("worker_lost"))[0]["time_s"]

    def returns() -> list[float]:
        return [e["time_s"] for e in running.events("worker_started") if e["rank"] == 1 and e["time_s"] > lost]

    back = running.until("the replacement", returns)
    slow.unlink()
    running.finish()
    meanwhile = [
        line for line in read_lines(running.path / "metrics.jsonl") if lost < line["time_s"] < min(back, default=1e9)
    ]
    assert meanwhile
    assert running.result()["steps"] == EPOCHS * STEPS_AN_EPOCH


@pytest.mark.parametrize("servers", [{}, COPIED], ids=["one", "four"])
def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_the_single_process(
    whole: Path, tmp_path: Path, servers: dict[str, int]
) -> None:
    running, slow = begin(strategy(**servers), tmp_path, name="worker")
    running.kill(1)
    running.until("the loss noticed", lambda: running.events("worker_lost"))
    slow.unlink()
    running.finish()
    assert_equal_to(whole, running.path)
    assert [(event["role"], event["rank"]) for event in running.events("worker_lost")] == [("worker", 1)]
    assert running.result()["restarts"] == 1


@pytest.mark.parametrize(("lead", "copy"), [(0, 3), (1, 2)])
def test_killed_servers_whose_shards_others_have_lose_nothing(
    whole: Path, tmp_path: Path, lead: int, copy: int
) -> None:
    running, slow = begin(strategy(**COPIED), tmp_path, name=f"copy-{lead}")
    for count, rank in enumerate((lead, copy), 1):
        running.kill(rank, "parameter_server")
        running.until("the loss noticed", lambda count=count: len(running.events("worker_lost")) == count)
    slow.unlink()
    running.finish()
    assert_equal_to(whole, running.path)
    assert [event["shard"] for event in running.events("server_taken_over")] == [lead]
    assert running.result()["restarts"] == 2
    assert running.result()["bytes"]["sent"] >= bytes_of_lines(running.path)  # also what the killed had counted


def test_servers_killed_after_the_last_step_cost_nothing(whole: Path, tmp_path: Path) -> None:
    """Kill the lead of a shard, and the copy of the other."""
    last = EPOCHS * STEPS_AN_EPOCH
    config = strategy(**COPIED) | {
        "allow_faults": True,
        "faults": [{"kill": f"parameter_server/{rank}", "at_step": last} for rank in (0, 3)],
    }
    run = orchestray.train(config, runs_dir=tmp_path, name="late")
    assert_equal_to(whole, run.path)
    assert run.result["restarts"] == 2


def test_a_lead_killed_when_its_workers_are_done_costs_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, take = ServerKills.do_next, CentralDriver._take
    are_done = False

    def take_at_the_end(driver: CentralDriver) -> bool:
        nonlocal are_done
        are_done = not driver._worker_group.working
        return take(driver)

    def kill_at_the_end(kills: ServerKills) -> None:
        if are_done:
            kill(kills)

    monkeypatch.setattr(CentralDriver, "_take", take_at_the_end)
    monkeypatch.setattr(ServerKills, "do_next", kill_at_the_end)
    config = strategy(**COPIED) | {
        "allow_faults": True,
        "faults": [{"kill": "parameter_server/0", "at_step": 1}],
    }
    run = orchestray.train(config, runs_dir=tmp_path, name="late")
    assert run.result["status"] == "succeeded"
    assert_equal_to(whole, run.path)
    assert run.result["restarts"] == 1


def test_a_run_that_fails_before_it_has_begun_gives_its_places_back(cluster: Cluster, tmp_path: Path) -> None:
    make_room(cluster)
    settings = central_settings(1)
    incomplete = replace(
        settings, exchange={key: settings.exchange[key] for key in settings.exchange if key != "shards"}
    )
    shapes = [Shape(role="parameter_server", size=1, cpus_per_member=0.0), Shape(role="worker", size=1)]
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        run_log = RunLog(RunProgress(time.time()), writer, Progress(name="run", quiet=True))
        driver = CentralDriver(Attempt(incomplete, cluster, run_log, None, threading.Event()), shapes)
        with pytest.raises(KeyError):
            driver.run()
    deadline_s = time.monotonic() + PATIENCE_S
    free = ray.available_resources
    while free().get("CPU", 0.0) < cluster.resources()["CPU"] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert free()["CPU"] == cluster.resources()["CPU"]
