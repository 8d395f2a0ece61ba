"""Trackers get every line of a run once and in order, and are never in its way."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.metrics import MetricsLog
from orchestray.trainers.trackers.feed import Feed
from support.patience import PATIENCE_S


class Recorder:
    """A tracker that records its calls, and fails or waits where it is to."""

    def __init__(self, *, failures: int = 0, known: int | None = None, gate: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures, self._known, self._gate = failures, known, gate
        self.has = threading.Condition()

    def start(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        self.calls.append(("start", config["name"], name, resumed))
        return self._known

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._gate is not None:
            self._gate.wait(PATIENCE_S)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is away\nmore")
        with self.has:
            self.calls.append((step, *metrics))
            self.has.notify_all()

    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))

    @property
    def steps(self) -> list[Any]:
        return [call[0] for call in self.calls if call[0] not in ("start", "finish")]

    def wait_for(self, steps: list[int]) -> None:
        with self.has:
            assert self.has.wait_for(lambda: self.steps == steps, PATIENCE_S), self.steps


class Run:
    """A run directory whose metrics are written, with a feed of a tracker."""

    def __init__(self, path: Path) -> None:
        self.path, self.warnings = path, list[str]()
        self.log = MetricsLog(path / "metrics.jsonl")

    def feed(self, tracker: Recorder, *, resumed: bool = False, waits_s: tuple[float, ...] = (0.0, 0.0)) -> Feed:
        made = Feed("mine.py:Mine", lambda _directory: tracker, self.path, self.warnings.append, waits_s=waits_s)
        made.start({"name": "run"}, "run", resumed=resumed)
        return made

    def steps(self, *numbers: int) -> None:
        self.log.append([{"step": step, "time_s": 0.1, "loss": 0.5, "note": "text"} for step in numbers])
        self.log.flush()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_each_line_is_given_in_order_with_its_split(run: Run) -> None:
    tracker = Recorder()
    feed = run.feed(tracker)
    run.steps(1, 2)
    run.log.append([{"step": 2, "split": "validation", "time_s": 0.2, "accuracy": None}])
    run.steps(3)
    feed.finish("succeeded")
    assert tracker.calls == [
        ("start", "run", "run", False),
        (1, "train/loss"),
        (2, "train/loss"),
        (2, "validation/accuracy"),
        (3, "train/loss"),
        ("finish", "succeeded"),
    ]
    assert run.warnings == []


def test_steps_that_are_done_again_after_a_checkpoint_are_not_given_again(run: Run) -> None:
    tracker = Recorder()
    feed = run.feed(tracker)
    run.steps(1, 2, 3, 4)
    tracker.wait_for([1, 2, 3, 4])
    run.log.truncate_after(2)
    run.steps(3, 4, 5, 6)
    feed.finish("succeeded")
    assert tracker.steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tells", [True, False], ids=["the tracker tells", "by what was written down"])
def test_a_resumed_run_goes_on_after_the_last_line_that_was_given(run: Run, tells: bool) -> None:
    first = Recorder()
    feed = run.feed(first)
    run.steps(1, 2, 3)
    feed.finish("interrupted")
    run.log.truncate_after(2)
    run.steps(3, 4)  # the last one came when nobody listened
    if tells:
        next((run.path / "trackers").iterdir()).write_text(json.dumps({"last": [2, False]}))  # it was killed before
    again = Recorder(known=3 if tells else None)
    feed = run.feed(again, resumed=True)
    run.steps(5)
    feed.finish("succeeded")
    assert again.calls[0] == ("start", "run", "run", True)
    assert [*first.steps, *again.steps] == [1, 2, 3, 4, 5]


def test_a_failure_is_tried_again_with_one_warning_and_no_line_is_lost(run: Run) -> None:
    tracker = Recorder(failures=2)
    feed = run.feed(tracker)
    run.steps(1, 2)
    tracker.wait_for([1, 2])
    feed.finish("succeeded")
    assert run.warnings == ["tracker mine.py:Mine: ConnectionError: the server is away; it is tried again"]
    assert tracker.calls[-1] == ("finish", "succeeded")


def test_a_tracker_that_never_works_is_given_up_with_a_sentence(run: Run) -> None:
    tracker = Recorder(failures=99)
    feed = run.feed(tracker)
    run.steps(1)
    feed.finish("succeeded")
    assert run.warnings[-1] == "tracker mine.py:Mine: ConnectionError: the server is away; the run goes on without it"
    assert tracker.steps == []


def test_a_tracker_that_is_stuck_does_not_hold_up_the_run(run: Run) -> None:
    gate = threading.Event()
    feed = run.feed(Recorder(gate=gate))
    run.steps(1)
    feed.finish("succeeded", timeout_s=0.05)
    gate.set()
    (warning,) = run.warnings
    assert warning.startswith("tracker mine.py:Mine: was not ready 0.05 s after the end of the run")


def test_a_line_is_read_when_it_is_complete(run: Run) -> None:
    feed = Feed("mine", lambda _directory: Recorder(), run.path, run.warnings.append)
    read = []
    for text in ('{"step": 1}\n{"step": 2, ', '"loss": 0.25', "}\n"):
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(text)
        read.append(list(feed._lines()))
    assert read == [[b'{"step": 1}\n'], [], [b'{"step": 2, "loss": 0.25}\n']]


def test_a_validation_that_was_not_given_before_a_kill_is_given_after_it(run: Run) -> None:
    run.steps(1, 2)
    run.log.append([{"step": 2, "split": "validation", "time_s": 0.2, "accuracy": 0.5}])
    run.steps(3)
    (run.path / "trackers").mkdir()
    (run.path / "trackers" / "mine-py-Mine.json").write_text(json.dumps({"last": [2, False]}))
    tracker = Recorder(known=2)
    run.feed(tracker, resumed=True).finish("succeeded")
    assert tracker.calls[1:-1] == [(2, "validation/accuracy"), (3, "train/loss")]
