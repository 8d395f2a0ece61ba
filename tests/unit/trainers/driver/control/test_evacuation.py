"""The stop of a run for a move away from drained nodes, and the members that others take over from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.errors import ClusterError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.control.evacuation import DrainWatch, Evacuation
from orchestray.trainers.driver.control.events import MoveWanted
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
from orchestray.trainers.driver.runlog.losses import Losses
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress

SETTINGS: Any = "settings"


class FakeGang:
    """A gang whose members are on given nodes, and whose new members are ready when a test says so."""

    def __init__(self, role: str, nodes: list[str]) -> None:
        self.shape = SimpleNamespace(role=role)
        self.cluster = SimpleNamespace(owned=False, room=None)
        self.membership = self
        self.nodes = nodes
        self.begun: list[tuple[int, str]] = []
        self.taken: list[int] = []
        self.is_built = self.is_full = False
        self.num_cancelled = 0

    def whereabouts(self) -> list[tuple[int, str]]:
        return [(0, node) for node in self.nodes]

    def begin_move(self, number: int, host: str, *_: Any) -> Any:
        if self.is_full:
            raise ClusterError("no room")
        self.begun.append((number, host))
        return SimpleNamespace(is_ready=lambda: self.is_built, cancel=self.cancel)

    def cancel(self) -> None:
        self.num_cancelled += 1

    def take_over(self, ranks: list[int]) -> None:
        self.taken += ranks
        for rank in ranks:
            self.nodes[rank] = "new"


class Drained:
    """A run of servers and workers on a cluster whose nodes are drained by hand."""

    def __init__(self, path: Path, writer: RunWriter, *, stay_together: bool = False) -> None:
        self.now_s, self.left_s = 0.0, dict[str, float]()
        self.servers, self.workers = FakeGang("parameter_server", ["a"]), FakeGang("worker", ["a", "b"])
        self._path, self._writer = path, writer
        run_log = RunLog(RunProgress(0.0), writer, Progress(name="run", quiet=True))
        losses = Losses(run_log, KillSchedule((), "worker"), "worker")
        hosts: Any = [(self.servers, "server host"), (self.workers, "worker host")]
        watch = DrainWatch(lambda: self.left_s, lambda: self.now_s)
        self.evacuation = Evacuation(hosts, run_log, losses, stay_together=stay_together, watch=watch)

    def news(self) -> list[Any]:
        self.now_s += 10.0
        return self.evacuation.news(SETTINGS)

    def events(self) -> list[dict[str, Any]]:
        self._writer.flush()
        return [json.loads(line) for line in (self._path / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def drained(tmp_path: Path) -> Iterator[Drained]:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        yield Drained(directory.path, writer)


def test_the_run_stops_once_all_that_will_take_over_are_ready_and_they_take_the_ranks_on_that_node(
    drained: Drained,
) -> None:
    assert drained.news() == []
    drained.left_s["a"] = 300.0
    assert drained.news() == []
    drained.servers.is_built = True
    assert drained.news() == [], "the worker is still being built"
    drained.workers.is_built = True
    assert drained.news() == [MoveWanted()]
    assert drained.news() == [], "it is said once"
    drained.evacuation.move()
    assert (drained.servers.begun, drained.servers.taken) == ([(1, "server host")], [0])
    assert (drained.workers.begun, drained.workers.taken) == ([(1, "worker host")], [0])
    assert drained.news() == []
    told = [(event["role"], event["ranks"]) for event in drained.events() if event["event"] == "node_draining"]
    assert told == [("parameter_server", [0]), ("worker", [0])]


def test_a_deadline_that_is_near_is_not_waited_for_and_those_that_are_not_ready_do_not_take_over(
    drained: Drained,
) -> None:
    drained.left_s["b"] = 14.0
    assert drained.news() == [MoveWanted()]
    drained.evacuation.move()
    assert (drained.workers.begun, drained.workers.taken) == ([(1, "worker host")], [])
    assert drained.workers.num_cancelled == 1


def test_without_another_place_the_run_stops_for_a_checkpoint_at_once(drained: Drained) -> None:
    drained.workers.is_full = True
    drained.left_s["a"] = 300.0
    assert drained.news() == [MoveWanted()]
    drained.evacuation.move()
    assert (drained.servers.taken, drained.workers.taken) == ([], [])
    assert drained.servers.num_cancelled == 1


def test_nodes_without_members_and_clusters_of_our_own_are_left_alone(drained: Drained) -> None:
    drained.left_s["c"] = 300.0
    assert drained.news() == []
    drained.servers.cluster.owned = True
    drained.left_s["a"] = 300.0
    assert drained.news() == []
    assert drained.servers.begun == drained.workers.begun == []


def test_members_that_share_memory_save_a_checkpoint_and_stay(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        drained = Drained(directory.path, writer, stay_together=True)
        drained.left_s["a"] = 300.0
        assert drained.news() == [MoveWanted()]
        drained.evacuation.move()
        assert drained.servers.begun == drained.workers.begun == []
        assert drained.news() == []
