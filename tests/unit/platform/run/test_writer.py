from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestray.platform.errors import StorageError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.writer import RunWriter


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path, "a") as run:
        yield run


def test_all_that_was_handed_over_is_written_in_order(run: RunDirectory) -> None:
    with RunWriter(run, clock=lambda: 1.5) as writer:
        writer.event("started", workers=2)
        for step in range(1, 1001):
            writer.metrics([{"step": step, "loss": 1.0}])
        writer.actors([{"role": "worker", "rank": 0, "pid": 1, "node": "n"}])
        writer.event("worker_lost", role="worker", rank=0)
        writer.flush()
        # After flush a kill could lose nothing.
        assert [line["step"] for line in read_lines(run.paths.metrics)] == list(range(1, 1001))
        writer.metrics([{"step": 1001, "loss": 1.0}])
    assert len(read_lines(run.paths.metrics)) == 1001
    assert [(line["event"], line["time_s"]) for line in read_lines(run.paths.events)] == [
        ("started", 1.5),
        ("worker_lost", 1.5),
    ]
    assert len(json.loads(run.paths.actors.read_text())) == 1
    assert len(list(run.paths.tensorboard.iterdir())) == 1


def test_truncating_also_drops_what_was_still_queued(run: RunDirectory) -> None:
    with RunWriter(run) as writer:
        writer.metrics([{"step": step, "time_s": step / 8} for step in range(1, 10)])
        writer.metrics([{"step": 6, "split": "validation", "loss": 1.0, "time_s": 0.8}])
        assert writer.truncate_after(6) == 0.75
        writer.metrics([{"step": 7}])
    assert [line["step"] for line in read_lines(run.paths.metrics)] == [1, 2, 3, 4, 5, 6, 6, 7]


def test_lines_reach_the_file_without_flush(run: RunDirectory) -> None:
    with RunWriter(run) as writer:
        writer.metrics([{"step": 1}])
        # The thread's own flush, due within half a second; other work must not put it off for ever.
        while not run.paths.metrics.stat().st_size:
            writer.event("something")
            threading.Event().wait(0.01)
    assert read_lines(run.paths.metrics) == [{"step": 1}]


def test_a_full_disk_is_told_to_the_caller_and_ends_the_thread_cleanly(run: RunDirectory) -> None:
    run.paths.metrics.symlink_to("/dev/full")
    writer = RunWriter(run)
    writer.metrics([{"step": 1, "loss": 1.0}])
    with pytest.raises(StorageError, match=r"could not write .*metrics\.jsonl: the disk is full"):
        writer.flush()
    with pytest.raises(StorageError, match="the disk is full"):
        writer.event("anything")
    with pytest.raises(StorageError, match="the disk is full"):
        writer.close()
    assert not any(thread.name == "run-writer" for thread in threading.enumerate())


def test_an_error_of_the_body_is_not_hidden_by_one_of_the_logs(run: RunDirectory) -> None:
    run.paths.metrics.symlink_to("/dev/full")

    def fail() -> None:
        with RunWriter(run) as writer:
            writer.metrics([{"step": 1}])
            raise RuntimeError("the cause")

    with pytest.raises(RuntimeError, match="the cause"):
        fail()


def test_a_line_that_cannot_be_written_is_told(run: RunDirectory) -> None:
    writer = RunWriter(run)
    writer.metrics([{"step": 1, "what": object()}])
    with pytest.raises(StorageError, match="could not write the logs of run 'a': object is no JSON value"):
        writer.flush()
    with pytest.raises(StorageError, match="no JSON value"):
        writer.close()


def test_a_closed_writer_refuses_more(run: RunDirectory) -> None:
    writer = RunWriter(run)
    writer.close()
    writer.close()
    with pytest.raises(StorageError, match="they are closed"):
        writer.event("late")
