"""Messages to Tune's controller: of trials, of processes that died, and of the end of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.engine.start_throttle import StartThrottle
from orchestray.search.engine.tuning import TrialPool, _Answers, _Controller, _Trials
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import Loop, make_config

LR = "train.optimizer.lr"


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    space = {LR: make_dimension("choice", values=[0.1])}
    made = Loop(make_method("grid", space=space, steps_per_trial=2), tmp_path)
    yield made
    made.close()


def lose(loop: Loop, answers: _Answers, trials: _Trials, number: int, *, is_idle: bool) -> None:
    """Find dead the process that has the search's trial, or was idle when it was to get it."""
    order = loop.conductor.begin()
    assert order is not None
    tunes_trial: Any = SimpleNamespace(trial_id=str(number))
    trials.begun[tunes_trial.trial_id] = order
    answers.on_trial_error(SimpleNamespace(_resetting_trials=[tunes_trial] if is_idle else []), tunes_trial)


def test_idle_processes_that_died_unnoticed_do_not_count_against_the_trial_that_was_to_have_them(loop: Loop) -> None:
    trials = _Trials(loop.conductor, loop.rules, [{}], StartThrottle(1, 1.0), [])
    answers = _Answers(trials)
    for number in range(3):
        lose(loop, answers, trials, number, is_idle=True)
    lose(loop, answers, trials, 3, is_idle=False)
    loop.run()
    assert loop.records.lines[0]["status"] == "succeeded"


def test_a_trial_whose_process_dies_twice_has_failed(loop: Loop) -> None:
    trials = _Trials(loop.conductor, loop.rules, [{}], StartThrottle(1, 1.0), [])
    answers = _Answers(trials)
    for number in range(2):
        lose(loop, answers, trials, number, is_idle=False)
    assert loop.records.lines[0]["status"] == "failed"
    assert "died 2 times" in loop.records.lines[0]["error"]


@dataclass(eq=False)
class TunesTrial:
    """Tune's trial that is in a process."""

    trial_id: str
    temporary_state: Any


class Starting:
    """Tune's controller with a trial under way and one whose process starts; each ends in the turn after its order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._running_trials = {self._trial("under way")}
        self._starting = [self._trial("starting")]

    def _trial(self, name: str) -> Any:
        actor = SimpleNamespace(halt=SimpleNamespace(remote=lambda: self.told.append(name)))
        return TunesTrial(name, SimpleNamespace(ray_actor=actor))

    def step(self) -> None:
        self._running_trials = {trial for trial in self._running_trials if trial.trial_id not in self.told}
        if self._starting:
            self._running_trials.add(self._starting.pop())


def test_a_trial_whose_process_starts_while_a_search_halts_is_told_to_halt_too(loop: Loop) -> None:
    stage: Any = TrialPool.__new__(TrialPool)
    stage._trials = _Trials(loop.conductor, loop.rules, [{}], StartThrottle(1, 1.0), [])
    stage._controller = Starting()
    stage.halt()
    assert stage._controller.told == ["under way", "starting"]
    assert not stage._controller._running_trials


class AskedOnce(_Trials):
    """Trials that Tune may ask for once."""

    num_asked = 0

    def next_trial(self) -> Any:
        self.num_asked += 1
        assert self.num_asked == 1, "whoever runs the search gets no turn while Tune asks again"
        return super().next_trial()


def ask_with_nothing_under_way(trials: _Trials) -> None:
    """Ask for trials as Tune's controller does in each of its turns."""
    controller: Any = _Controller.__new__(_Controller)
    controller._search_alg = trials
    controller._pending_trials, controller._running_trials, controller._paused_trials = set(), set(), set()
    controller._live_trials, controller._trials, controller._max_pending_trials = set(), [], 1
    controller._maybe_update_trial_queue()


def test_a_search_whose_method_finds_in_being_asked_that_it_has_no_more_is_over_with_that_turn(tmp_path: Path) -> None:
    space = {LR: make_dimension("choice", values=[0.1, 0.3])}
    loop = Loop(make_method("bayesian", space=space, steps_per_trial=2, trials=9), tmp_path)
    assert all(loop.step() for _ in range(2))
    assert not loop.conductor.is_over, "the method does not know yet"
    trials = AskedOnce(loop.conductor, loop.rules, [{}], StartThrottle(1, 1.0), [])
    ask_with_nothing_under_way(trials)
    loop.close()
    assert loop.conductor.is_over
    assert trials.failure is None


def test_so_is_one_whose_last_proposals_make_no_config(tmp_path: Path) -> None:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        if trial > 0:
            raise ConfigError("no config")
        return make_config(changes, genome, steps, trial)

    space = {LR: make_dimension("choice", values=[0.1, 0.3])}
    loop = Loop(make_method("grid", space=space, steps_per_trial=2), tmp_path, make=make)
    assert loop.step()
    trials = AskedOnce(loop.conductor, loop.rules, [{}], StartThrottle(1, 1.0), [])
    ask_with_nothing_under_way(trials)
    loop.close()
    assert loop.conductor.is_over
    assert loop.records.lines[1]["status"] == "failed"
    assert trials.failure is None


@pytest.mark.parametrize("has_place", [True, False])
def test_a_trial_takes_an_idle_process_where_its_own_waits_for_a_place_and_not_where_it_starts(has_place: bool) -> None:
    trial: Any = "a trial of Tune's"
    controller: Any = _Controller.__new__(_Controller)
    controller._search_alg = SimpleNamespace(is_exhausted=False)
    controller._trial_to_actor = {trial: "its process"}
    controller._actor_manager = SimpleNamespace(is_actor_started=lambda actor: has_place)
    controller._resetting_trials = [trial]  # Tune's own method says of such a trial that it has taken one
    assert controller._maybe_reuse_cached_actor(trial) is not has_place
