"""Runs that go on with more or fewer workers, under every kind of exchange, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

import orchestray
from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import make_room
from orchestray.platform.run.checkpoint import load_model_tensors
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.driver.runlog.scale_requests import RefusedError, ask_to_scale
from support.patience import PATIENCE_S
from support.under_way import UnderWay, losses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

TASK = f"{Path(__file__).parents[1]}/support/slow_task.py:SlowTask"
TIMEOUT_S = PATIENCE_S
NUM_STEPS = 40
SERVERS = {"type": "parameter_server"}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


def config(runs: Path, exchange: dict[str, Any] | None = None, **network: int) -> dict[str, Any]:
    return {
        "name": "scaled",
        "task": {"type": TASK, "slow": str(runs / "slow")},
        "train": {
            "batch_size": 16,
            "steps": NUM_STEPS,
            "precision": "float64",
            "validate_every_steps": 20,
            "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.9},
        },
        "strategy": {"network": {"data": 2, **network}, "exchange": exchange or {"type": "allreduce"}},
        "checkpoint": {"every_steps": 25},
    }


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an undisturbed run of one process."""
    runs = tmp_path_factory.mktemp("whole")
    return orchestray.train(config(runs, data=1), runs_dir=runs, name="whole").path


class Slow:
    """A run whose steps are slow until `finish`."""

    def __init__(self, runs: Path, exchange: dict[str, Any] | None = None, **network: int) -> None:
        (runs / "slow").touch()
        self._slow = runs / "slow"
        self.run = UnderWay(config(runs, exchange, **network), runs, name="scaled")
        self.run.until("a step", self.run.steps)

    def scale(self, data: int) -> dict[str, Any]:
        return ask_to_scale(self.run.path, data, TIMEOUT_S)

    def finish(self) -> None:
        self._slow.unlink(missing_ok=True)
        self.run.finish()


class Asking:
    """A request, from a thread."""

    def __init__(self, slow: Slow, data: int) -> None:
        self._answer: dict[str, Any] = {}
        self._error: BaseException | None = None

        def ask() -> None:
            try:
                self._answer = slow.scale(data)
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def wait(self) -> dict[str, Any]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._answer


def assert_every_step_once(path: Path, expected: Path | None = None) -> None:
    """Assert every step once in metrics.jsonl, and the losses and weights of another run, if one is given."""
    found = losses(path)
    assert [step for step, _ in found] == list(range(1, NUM_STEPS + 1))
    if expected is None:
        return
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in losses(expected)], rel=0, abs=1e-6)
    weights = load_model_tensors(str(expected / "model"))
    for name, tensor in load_model_tensors(str(path / "model")).items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-6), name


def assert_scaled(slow: Slow, *changes: tuple[int, int]) -> None:
    """Assert that the run reports the changes, has succeeded, and has its last size in its config."""
    run = slow.run
    assert [(event["from"], event["to"]) for event in run.events("scaled")] == list(changes)
    assert (run.result()["status"], run.result()["steps"]) == ("succeeded", NUM_STEPS)
    assert load_train_config(run.path / "config.yaml").strategy.network.data == changes[-1][1]


def test_an_allreduce_run_of_2_then_3_then_1_workers_is_the_single_process_also_after_a_request_that_is_refused(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    slow = Slow(tmp_path)
    before = slow.run.actors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "owned", False)  # on one of our own workers may share the cores
        with pytest.raises(RefusedError, match=r"cannot place 64 worker.* it has 1 node.*The run goes on as it was\."):
            slow.scale(64)
    assert slow.run.events("scaled") == []
    assert load_train_config(slow.run.path / "config.yaml").strategy.network.data == 2
    answer = slow.scale(3)
    assert (answer["before"], answer["after"], answer["workers_after"]) == (2, 3, 3)
    grown = slow.run.until("three workers", lambda: len(slow.run.actors()) == 3 and slow.run.actors())
    assert {rank: grown[rank] for rank in before} == before
    assert slow.scale(1)["step"] > answer["step"]
    assert slow.run.actors() == {0: before[0]}
    slow.finish()
    assert_every_step_once(slow.run.path, whole)
    assert_scaled(slow, (2, 3), (3, 1))
    assert slow.run.result()["restarts"] == 0


@pytest.mark.slow
def test_a_pipeline_gets_a_second_copy(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    slow = Slow(tmp_path, data=1, pipeline=2, microbatches=2)
    answer = slow.scale(2)
    assert (answer["workers_before"], answer["workers_after"]) == (2, 4)
    slow.finish()
    assert_every_step_once(slow.run.path, whole)
    assert_scaled(slow, (1, 2))


@pytest.mark.slow
def test_replicas_that_differ_become_more(cluster: Cluster, tmp_path: Path) -> None:
    slow = Slow(tmp_path, {"type": "gossip", "graph": "complete"})
    slow.scale(3)
    slow.finish()
    assert_every_step_once(slow.run.path)
    assert_scaled(slow, (2, 3))


def test_synchronous_servers_with_2_then_4_then_1_workers_are_the_single_process(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    slow = Slow(tmp_path, {**SERVERS, "shards": 2})
    before = slow.run.actors()
    slow.scale(4)
    grown = slow.run.until("four workers", lambda: len(slow.run.actors()) == 4 and slow.run.actors())
    assert {rank: grown[rank] for rank in before} == before
    slow.scale(1)
    slow.finish()
    assert_every_step_once(slow.run.path, whole)
    assert_scaled(slow, (2, 4), (4, 1))
    result = slow.run.result()
    assert result["restarts"] == 0
    assert len(result["workers"]) == 4
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in grown.values() if psutil.pid_exists(pid)], 0)
    assert {process.pid for process in alive} <= {before[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "role", "rank"),
    [({"type": "allreduce"}, "worker", 1), (SERVERS, "worker", 0), (SERVERS, "parameter_server", 0)],
    ids=["allreduce", "worker", "server"],
)
def test_deaths_while_a_run_grows_cost_no_step(
    whole: Path, cluster: Cluster, tmp_path: Path, exchange: dict[str, Any], role: str, rank: int
) -> None:
    slow = Slow(tmp_path, exchange)
    workers = slow.run.actors().values()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # the new one joins at the end of a step
    asking = Asking(slow, 3)
    os.kill(slow.run.until("a new worker", lambda: slow.run.actors("joining"))[0], signal.SIGKILL)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    slow.run.kill(rank, role)
    assert asking.wait()["after"] == 3
    slow.finish()
    assert_every_step_once(slow.run.path, whole)
    assert_scaled(slow, (2, 3))
    lost = {(event["role"], event["rank"]) for event in slow.run.events("worker_lost")}
    assert lost - {("worker", 2)} == {(role, rank)}, "and the new one, if it had joined when it was killed"


def test_a_gang_that_shrinks_gives_back_what_it_asked_for_when_it_grew(cluster: Cluster) -> None:
    make_room(cluster)
    gang = Gang(cluster, Shape(role="worker", size=2))
    try:
        before = groups_there()
        gang.host("support.hosted:Adder", 1.0)
        gang.membership.shrink(1)
        growth = gang.membership.begin_growth(3, "support.hosted:Adder", 1.0)  # one of them where the last member was
        while not growth.is_ready():
            for slot in growth.slots:
                ray.wait([slot.hosting], timeout=TIMEOUT_S)
        gang.membership.adopt()
        gang.meet()
        assert gang.gather(gang.call("total")) == [10.0] * 4
        assert len(groups_there() - before) == 2
        gang.membership.shrink(2)
        gang.meet()
        assert gang.gather(gang.call("total")) == [3.0] * 2
        assert groups_there() == before
    finally:
        gang.close()


def groups_there() -> set[str]:
    """Return the placement groups that hold something."""
    return {name for name, group in placement_group_table().items() if group["state"] == "CREATED"}


def test_of_two_requests_the_second_waits_for_the_first(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    slow = Slow(tmp_path, {**SERVERS, "consistency": "asynchronous"})
    first = Asking(slow, 3)
    slow.run.until("the first taken up", lambda: list((slow.run.path / ".requests").glob("*.taken")))
    second = Asking(slow, 1)
    assert (first.wait()["after"], second.wait()["before"]) == (3, 3)
    slow.finish()
    assert_every_step_once(slow.run.path)
    assert_scaled(slow, (2, 3), (3, 1))
