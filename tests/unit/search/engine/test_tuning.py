"""What the death of a process means for the trial it was to carry out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.search.engine.crowd import Crowd
from orchestray.search.engine.tuning import _Answers, _Controller, _Trials
from orchestray.search.methods.registry import make_method
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import Loop


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    space = {"train.optimizer.lr": make_dimension("choice", values=[0.1])}
    made = Loop(make_method("grid", space=space, steps_per_trial=2), tmp_path)
    yield made
    made.close()


def lose(loop: Loop, answers: _Answers, trials: _Trials, number: int, *, is_idle: bool) -> None:
    """The process that has the search's trial, or was idle when it was to get it, turns out to be dead."""
    order = loop.conductor.begin()
    assert order is not None
    tunes_trial: Any = SimpleNamespace(trial_id=str(number))
    trials.begun[tunes_trial.trial_id] = order
    answers.on_trial_error(SimpleNamespace(_resetting_trials=[tunes_trial] if is_idle else []), tunes_trial)


def test_idle_processes_that_died_unnoticed_do_not_count_against_the_trial_that_was_to_have_them(loop: Loop) -> None:
    trials = _Trials(loop.conductor, loop.rules, [{}], Crowd(1, 1.0), [])
    answers = _Answers(trials)
    for number in range(3):
        lose(loop, answers, trials, number, is_idle=True)
    lose(loop, answers, trials, 3, is_idle=False)
    loop.run()
    assert loop.records.lines[0]["status"] == "succeeded"


def test_a_trial_whose_process_dies_twice_has_failed(loop: Loop) -> None:
    trials = _Trials(loop.conductor, loop.rules, [{}], Crowd(1, 1.0), [])
    answers = _Answers(trials)
    for number in range(2):
        lose(loop, answers, trials, number, is_idle=False)
    assert loop.records.lines[0]["status"] == "failed"
    assert "died 2 times" in loop.records.lines[0]["error"]


@pytest.mark.parametrize("has_place", [True, False])
def test_a_trial_takes_an_idle_process_where_its_own_waits_for_a_place_and_not_where_it_starts(has_place: bool) -> None:
    trial: Any = "a trial of Tune's"
    controller: Any = _Controller.__new__(_Controller)
    controller._search_alg = SimpleNamespace(is_exhausted=False)
    controller._trial_to_actor = {trial: "its process"}
    controller._actor_manager = SimpleNamespace(is_actor_started=lambda actor: has_place)
    controller._resetting_trials = [trial]  # Tune's own method says of such a trial that it has taken one
    assert controller._maybe_reuse_cached_actor(trial) is not has_place
