"""A driver that asks processes for lines, and does not wait for ever for one that is frozen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import make_room
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.runlog import line_fetcher
from orchestray.trainers.driver.runlog.line_fetcher import LineFetcher, copies_of
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress
from support.cli import read_lines
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

LINES = [
    {"step": 1, "time_s": 0.1, "loss": 0.5},
    {"event": "checkpoint_saved", "step": 1},
    {"step": 2, "time_s": 0.2, "loss": 0.4},
]


def test_what_a_frozen_process_was_asked_for_is_waited_for_no_longer_than_a_while_and_written_down_once_it_goes_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_fetcher, "ANSWER_TIMEOUT_S", 0.5)
    make_room(cluster)
    gang = Gang(cluster, Shape(role="worker", size=1))
    asked: list[str] = []
    try:
        gang.host("support.hosted:Teller", LINES)
        pid = gang.gather(gang.call("pid"))[0]
        with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
            inquiry = LineFetcher(RunLog(RunProgress(time.time()), writer, Progress(name="run", quiet=True)))

            def ask() -> object:
                asked.append("drain")
                return gang.control_one(0, "drain")

            os.kill(pid, signal.SIGSTOP)
            try:
                inquiry.ask(ask)
                assert not inquiry.take()
                assert copies_of([gang.control_one(0, "pid")]) == []
            finally:
                os.kill(pid, signal.SIGCONT)
            deadline_s = time.monotonic() + PATIENCE_S
            inquiry.ask(ask)
            while not inquiry.take() and time.monotonic() < deadline_s:
                inquiry.ask(ask)
            assert asked == ["drain"]  # what came of another question could have overtaken it
            inquiry.ask(ask)
            assert not inquiry.take()
    finally:
        gang.close()
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "checkpoint_saved"] == [1]
