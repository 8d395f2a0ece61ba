"""The driver's handling of messages of workers that it did not start itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.actors.member import Failure, Identity
from orchestray.platform.actors.slot import Patience
from orchestray.platform.errors import DataError, Interrupted, TrainingError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.driver.control.evacuation import DrainWatch
from orchestray.trainers.driver.engines.heartbeats import Heartbeats
from orchestray.trainers.driver.engines.listener import Listener
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress

SIZES = {"samples": 64, "parameters": 3, "total_steps": 10, "steps_per_epoch": 2}


class Heard:
    """A listener to two workers, and the run directory it writes."""

    def __init__(self, path: Path, writer: RunWriter) -> None:
        self.path = path
        self.run_progress = RunProgress(time.time() - 5)
        self._writer = writer
        run_log = RunLog(self.run_progress, writer, Progress(name="run", quiet=True))
        self._drained: dict[str, float] = {}
        heartbeats, drains = Heartbeats(2, Patience()), DrainWatch(lambda: self._drained)
        self.listener = Listener(run_log, heartbeats, drains, batch_size=32, max_restarts=1, resuming=False)

    def hear(self, *messages: tuple[str, Any]) -> None:
        self.listener.hear(list(messages))

    def attempt(self, first_pid: int) -> None:
        self.hear(("attempt", None), *(("entered", actor(rank, first_pid + rank)) for rank in (0, 1)), ("sizes", SIZES))

    def answer(self, rank: int, answer: Any) -> None:
        self.hear(("answer", (rank, answer)), ("silent", rank))

    def move(self, node: str) -> None:
        """Have a node be drained."""
        self._drained[node] = 60.0

    def moved(self, step: int) -> None:
        """Have both workers stop for a move."""
        for rank in (0, 1):
            self.hear(("moved", (rank, outcome(step))), ("silent", rank))

    def events(self) -> list[str]:
        self._writer.flush()
        return [json.loads(line)["event"] for line in (self.path / "events.jsonl").read_text().splitlines()]

    def actors(self) -> list[int]:
        self._writer.flush()
        return [actor["pid"] for actor in json.loads((self.path / "actors.json").read_text())]


def actor(rank: int, pid: int) -> tuple[int, Identity, str]:
    return rank, Identity(pid, "here"), "node"


def outcome(step: int) -> Outcome:
    return Outcome("interrupted", step, 1.0, {}, 0, 0, 0, 1.0, [], [])


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        yield Heard(directory.path, writer)


def test_the_first_event_is_that_the_run_started_and_the_workers_follow(heard: Heard) -> None:
    heard.attempt(10)
    assert heard.events() == ["started", "worker_started", "worker_started"]
    assert heard.actors() == [10, 11]
    assert heard.run_progress.total_steps == 10


def test_the_outcome_is_that_of_rank_0_once_all_have_answered(heard: Heard) -> None:
    heard.attempt(10)
    heard.answer(1, "one")
    assert not heard.listener.is_complete
    heard.answer(0, "zero")
    assert heard.listener.is_complete
    assert heard.listener.judge(None) == "zero"


def test_a_new_attempt_is_a_restart_in_which_old_answers_are_void(heard: Heard) -> None:
    heard.attempt(10)
    heard.answer(0, "zero")
    heard.hear(("lost", {1: "killed"}))
    assert heard.actors() == []
    heard.attempt(20)
    heard.answer(1, "one")
    assert not heard.listener.is_complete
    assert heard.run_progress.restarts == 1
    assert heard.actors() == [20, 21]
    assert heard.events() == ["started", *["worker_started"] * 2, "worker_lost", *["worker_started"] * 2]
    heard.hear(("lines", [{"step": 1, "epoch": 1, "time_s": 99.0, "loss": 1.0}]))
    assert heard.events()[-1] == "recovered"


def test_what_a_worker_of_the_last_attempt_says_late_is_not_of_the_next(heard: Heard) -> None:
    heard.attempt(10)
    heard.hear(("lost", {0: "killed"}), ("silent", 1), ("answer", (1, "old")))
    heard.attempt(20)
    heard.answer(0, "zero")
    assert not heard.listener.is_complete
    heard.answer(1, "one")
    assert heard.listener.judge(None) == "zero"
    assert heard.run_progress.restarts == 1


def test_a_worker_that_dies_with_its_work_done_is_no_loss(heard: Heard) -> None:
    heard.attempt(10)
    heard.answer(0, "zero")
    heard.answer(1, "one")
    heard.hear(("lost", {0: "killed"}))
    assert heard.listener.judge(RuntimeError("Training failed")) == "zero"
    assert "worker_lost" not in heard.events()


def test_one_loss_too_many_ends_the_run_with_its_cause(heard: Heard) -> None:
    heard.attempt(10)
    heard.hear(("lost", {1: "killed"}))
    heard.attempt(20)
    with pytest.raises(TrainingError, match=r"^Worker 0 died \(also killed\) after 1 recovery, and"):
        heard.hear(("lost", {0: "also killed"}))


def test_a_users_error_is_what_the_run_ends_with_once_the_others_have_left(heard: Heard) -> None:
    heard.attempt(10)
    heard.answer(1, Failure(DataError("no such column"), "Traceback"))
    assert not heard.listener.is_complete
    heard.hear(("silent", 0))
    assert heard.listener.is_complete
    with pytest.raises(DataError, match="no such column"):
        heard.listener.judge(None)
    assert heard.events()[-1] == "worker_failed"


def test_an_end_without_answers_says_what_ray_train_said(heard: Heard) -> None:
    with pytest.raises(TrainingError, match=r"^Ray Train ended the run: Worker group is not active\.$"):
        heard.listener.judge(RuntimeError("Training failed due to controller error:\nWorker group is not active."))


def test_workers_that_have_ended_for_a_move_begin_again_without_a_count(heard: Heard) -> None:
    heard.attempt(100)
    heard.move("node")
    assert heard.listener.look_at({}) == ["move"]
    heard.moved(step=7)
    assert not heard.listener.is_complete
    assert heard.listener.look_at({}) == ["moved"]
    heard.hear(("lost", {}))
    heard.attempt(200)
    for rank in (0, 1):
        heard.answer(rank, outcome(9))
    assert heard.listener.judge(None).step == 9
    assert heard.run_progress.restarts == 0
    assert "worker_lost" not in heard.events()
    assert heard.events().count("node_draining") == 1


def test_a_run_that_finds_no_other_place_for_a_move_ends_with_the_status_of_sigterm(heard: Heard) -> None:
    heard.attempt(100)
    heard.move("node")
    heard.listener.look_at({})
    heard.moved(step=7)
    with pytest.raises(Interrupted, match="Interrupted at step 7, with a checkpoint saved") as raised:
        heard.listener.judge(TimeoutError("no place"))
    assert raised.value.exit_status == 143


def test_nodes_without_workers_are_left_alone(heard: Heard) -> None:
    heard.attempt(100)
    heard.move("another node")
    assert heard.listener.look_at({}) == []
    assert "node_draining" not in heard.events()
