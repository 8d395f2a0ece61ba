"""A run without steps is reported, with who is silent or stuck and who waits; one that goes on is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.actors.slot import State
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.runlog.hang_report import HangReport
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress


class Watched:
    """A run of workers in given states, whose clock is set by hand."""

    def __init__(self, path: Path, writer: RunWriter, *, report_s: float | None = 60.0) -> None:
        self.now_s = 1000.0
        self.states: dict[str, list[State | None]] = {"worker": [], "parameter_server": []}
        self.shown: list[str | None] = []
        self._path, self._writer = path, writer
        self.run_log = RunLog(RunProgress(0.0), writer, Progress(name="run", quiet=True))
        self.run_log.progress.set_silence = self.shown.append  # type: ignore[method-assign]
        gangs: list[Any] = [self._gang(role) for role in self.states]
        self.report = HangReport(self.run_log, gangs, report_s, lambda: self.now_s)

    def _gang(self, role: str) -> SimpleNamespace:
        return SimpleNamespace(shape=SimpleNamespace(role=role), states=lambda _now_s: self.states[role])

    def step(self, number: int, takes_s: float = 0.1) -> None:
        self.now_s += takes_s
        self.run_log.run_progress.last_step = number
        self.run_log.run_progress.goodput.complete(self.now_s, after_loss=False)
        self.report.look()

    def after(self, seconds: float, *workers: tuple[str, float]) -> list[dict[str, Any]]:
        """Let time pass with workers in these states; return the events so far."""
        self.states["worker"] = [State(kind, for_s) for kind, for_s in workers]  # type: ignore[arg-type]
        self.now_s += seconds
        self.report.look()
        self._writer.flush()
        return [json.loads(line) for line in (self._path / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        made = Watched(tmp_path / "run", writer)
        made.run_log.run_progress.goodput.begin(made.now_s)
        for number in range(1, 4):
            made.step(number)
        yield made


def test_who_is_silent_and_who_waits_is_said_after_the_time_and_then_ever_less_often(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    states = ("waiting", 50.0), ("silent", 14.0), ("waiting", 50.0)
    assert watched.after(59.0, *states) == []
    *_, event = watched.after(2.0, *states)
    assert (event["event"], event["step"], event["seconds"]) == ("no_progress", 3, 61.0)
    assert event["processes"] == {"worker 0": "waiting", "worker 1": "silent", "worker 2": "waiting"}
    blame = "worker 1 has not answered for 14 s; worker 0 and worker 2 wait for it"
    warning = f"run: warning: no step for 1:01 min (one takes 100 ms): {blame}. `orchestray runs stacks`"
    assert capsys.readouterr().err.startswith(warning)
    assert watched.shown[-1] == f"no step for 1:01 min: {blame}"
    assert [len(watched.after(seconds, *states)) for seconds in (30.0, 30.0, 2.0, 60.0)] == [1, 1, 2, 2]
    watched.step(4)
    assert watched.shown[-1] is None
    assert len(watched.after(59.0, *states)) == 2


def test_a_process_that_does_not_answer_is_named_once_also_a_server(watched: Watched) -> None:
    watched.states["parameter_server"] = [State("working", 99.0), State("silent", 20.0)]
    for _ in range(3):
        found = watched.after(5.0, ("waiting", 5.0))
    assert [(line["event"], line["role"], line["rank"]) for line in found] == [("no_answer", "parameter_server", 1)]


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([("waiting", 70.0), ("waiting", 70.0)], "worker 0 and worker 1 wait for each other"),
        (
            [("working", 70.0), ("waiting", 70.0)],
            "worker 0 has computed or read data without an end for 1:10 min; w",
        ),
        (
            [("building", 70.0), ("silent", 9.0)],
            "worker 0 has been building its task and model for 1:10 min; worker 1",
        ),
        ([], "no step for 1:10 min"),
    ],
)
def test_each_kind_of_hang_has_its_words(watched: Watched, workers: list[tuple[str, float]], text: str) -> None:
    assert watched.after(70.0, *workers)[-1]["event"] == "no_progress"
    assert text in str(watched.shown[-1])


def test_a_validation_that_goes_on_is_no_hang(watched: Watched) -> None:
    assert watched.after(300.0, ("working", 2.0), ("waiting", 2.0)) == []
    assert watched.shown == [] or watched.shown[-1] is None


def test_steps_that_take_long_have_ten_times_as_long(watched: Watched) -> None:
    for number in range(4, 20):
        watched.step(number, takes_s=30.0)
    assert watched.after(299.0, ("working", 299.0)) == []
    assert len(watched.after(2.0, ("working", 301.0))) == 1


def test_nothing_is_reported_where_that_is_not_wanted(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        watched = Watched(tmp_path / "run", writer, report_s=None)
        watched.step(1)
        assert watched.after(9999.0, ("waiting", 9999.0)) == []
