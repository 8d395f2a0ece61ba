"""Files of states: those that a search keeps, and those from which a trial goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.search.checkpoints.state_files import KEPT, StateAt, StateFiles
from orchestray.search.checkpoints.states import BestCheckpoint, States
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.methods.base import Report
from orchestray.search.trials.program import TrialState
from unit.search.engine.test_controller import Scripted


class Alone(Scripted):
    """Three trials that never take over each other's states."""

    @property
    def hands_on(self) -> bool:
        return False


class Told:
    """The states of a search of three trials, as its processes write them."""

    def __init__(self, folder: Path, *, hands_on: bool) -> None:
        self.session = MethodSession(Scripted({}) if hands_on else Alone({}), MemoryJournal())
        self.files = StateFiles(folder)
        self.states = States(self.session, self.files)
        for _ in range(3):
            self.session.ask()

    def write(self, at: StateAt) -> None:
        self.files.write(at, TrialState({"a": torch.zeros(3)}, {KEPT: {"report": at.report}}))

    def report(self, trial: int, score: float, *, is_written: bool = True) -> None:
        number = self.session.trials[trial].num_reports + 1
        if is_written:
            self.write(StateAt(trial, number))
        self.session.report(Report(trial, 2 * number, score))
        self.states.reported(trial, is_written=is_written)
        if is_written:
            self.states.keep(BestCheckpoint(score, trial, 2 * number, number))

    def end(self, trial: int, status: str = "succeeded") -> None:
        self.session.tell(trial, status)
        self.states.ended(trial)


@pytest.fixture(params=[False, True], ids=["alone", "hands on"])
def told(request: pytest.FixtureRequest, tmp_path: Path) -> Told:
    return Told(tmp_path, hands_on=request.param)


def test_of_a_running_trial_the_best_state_and_the_last_have_files(told: Told) -> None:
    for score in (0.5, 0.9, 0.3, 0.4):
        told.report(0, score)
    assert told.files.reports() == {0: {2, 4}}
    told.report(0, 0.95)
    assert told.files.reports() == {0: {5}}


def test_a_trial_that_ends_leaves_its_best_and_its_last_only_where_it_is_taken_over(told: Told) -> None:
    for score in (0.9, 0.3):
        told.report(0, score)
        told.report(1, score)
    told.write(StateAt(0, 3, is_on_the_way=True))
    told.end(0)
    told.end(1, "failed")
    are_taken_over = told.states.are_exact
    assert told.files.reports() == ({0: {1, 2}, 1: {2}} if are_taken_over else {0: {1}})
    assert told.files.on_the_way(0) is None
    best = told.states.best()
    assert best is not None
    assert best.at == StateAt(0, 1)


def test_a_trial_goes_on_from_the_way_to_its_next_report_and_else_from_its_last(told: Told) -> None:
    assert told.states.source_of(0) is None
    told.write(StateAt(0, 1, is_on_the_way=True))
    assert told.states.source_of(0) == StateAt(0, 1, is_on_the_way=True)
    told.report(0, 0.5)
    assert told.states.source_of(0) == StateAt(0, 1)
    told.write(StateAt(0, 2, is_on_the_way=True))
    assert told.states.source_of(0) == StateAt(0, 2, is_on_the_way=True)


def test_where_any_state_will_do_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    told = Told(tmp_path, hands_on=False)
    told.report(0, 0.9)
    told.report(0, 0.5, is_written=False)
    assert told.states.source_of(0) == StateAt(0, 1)
    told.write(StateAt(0, 2, is_on_the_way=True))
    told.report(0, 0.4)
    assert told.states.source_of(0) == StateAt(0, 3)
    told.files.path(StateAt(0, 3)).write_bytes(b"")
    assert told.states.source_of(0) == StateAt(0, 2, is_on_the_way=True)
    told.files.remove(StateAt(0, 2, is_on_the_way=True))
    assert told.states.source_of(0) == StateAt(0, 1)
    told.files.remove(StateAt(0, 1))
    assert told.states.source_of(0) is None


def test_a_state_whose_report_was_never_heard_is_not_taken_for_the_last(told: Told) -> None:
    told.report(0, 0.5)
    told.write(StateAt(0, 2))
    again = States(told.session, told.files)
    assert again.source_of(0) == StateAt(0, 1)
    assert told.files.reports() == {0: {1}}
    best = again.best()
    assert best is not None
    assert best.at == StateAt(0, 1)
