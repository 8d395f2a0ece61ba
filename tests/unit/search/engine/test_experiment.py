"""A search in Ray Tune, whose calls are made here: trials, results, losses of processes, and the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from orchestray.platform.errors import ConfigError
from orchestray.search.engine.experiment import Decisions, Experiment, Proposals
from orchestray.search.engine.messages import TrialTask
from orchestray.search.engine.start_throttle import StartThrottle
from orchestray.search.engine.trainable import ANSWER, TrialFailedError
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import Loop, make_config

LR = "train.optimizer.lr"


class TunesTrial:
    """Tune's trial in a process, or without one."""

    def __init__(self, trial_id: str, config: Any, folder: Path) -> None:
        self.trial_id, self.config = trial_id, config
        self.pickled_error_file: str | None = None
        self.given: list[TrialTask] = []
        self.is_paused = False
        self._folder = folder
        self.temporary_state: Any = SimpleNamespace(ray_actor=SimpleNamespace(give=SimpleNamespace(remote=self._give)))

    def _give(self, task: TrialTask, values: dict[str, Any]) -> None:
        self.given.append(task)

    def set_config(self, config: Any) -> None:
        self.config = config

    def died(self, error: Exception) -> None:
        path = self._folder / f"{self.trial_id}.pkl"
        path.write_bytes(cloudpickle.dumps(error))
        self.pickled_error_file = str(path)


class Tune:
    """Tune's controller, whose trials are worked on by the hosts of a loop."""

    def __init__(self, loop: Loop, folder: Path, parallel: int = 1) -> None:
        self.loop, self._folder = loop, folder
        self.experiment = Experiment(loop.conductor, loop.rules, StartThrottle(parallel, float(parallel)))
        self.proposals = Proposals(self.experiment, "accuracy", "max")
        self.decisions = Decisions(self.experiment)
        self.trials: list[TunesTrial] = []
        self.stopped: list[TunesTrial] = []

    def ask(self) -> TunesTrial | None:
        config = self.proposals.suggest(f"id-{len(self.trials)}")
        if config is None or config == Searcher.FINISHED:
            return None
        self.trials.append(TunesTrial(f"id-{len(self.trials)}", config, self._folder))
        self.experiment.send(self._as_trial(self.trials[-1]), self.experiment.tasks[self.trials[-1].trial_id])
        return self.trials[-1]

    @staticmethod
    def _as_trial(trial: TunesTrial) -> Any:
        return trial

    def pause_trial(self, trial: TunesTrial, should_checkpoint: bool = True) -> None:
        assert not should_checkpoint
        trial.is_paused = True

    def stop_trial(self, trial: TunesTrial) -> None:
        self.stopped.append(trial)

    def work(self, trial: TunesTrial) -> str:
        """Carry out the last task of a trial, and return the decision."""
        answer = self.loop.hosts[0].work(trial.given[-1])
        return self.decisions.on_trial_result(self, self._as_trial(trial), {ANSWER: answer})

    def lose(self, trial: TunesTrial, error: Exception) -> None:
        trial.died(error)
        self.decisions.on_trial_error(self, self._as_trial(trial))


@pytest.fixture
def tunes(tmp_path: Path) -> Iterator[Any]:
    made: list[Loop] = []

    def make(method: Any = None, parallel: int = 1, **settings: Any) -> Tune:
        space = {LR: make_dimension("choice", values=[0.1])}
        method = method or make_method("grid", space=space, steps_per_trial=2)
        made.append(Loop(method, tmp_path / str(len(made)), parallel=parallel, **settings))
        return Tune(made[-1], tmp_path, parallel)

    yield make
    for loop in made:
        loop.close()


def test_a_trial_has_the_values_of_the_space_and_ends_by_its_last_result(tunes: Any) -> None:
    tune = tunes()
    trial = tune.ask()
    assert trial.config == {LR: 0.1}
    assert tune.work(trial) == TrialScheduler.STOP
    assert tune.loop.records.lines[0]["status"] == "succeeded"
    assert tune.proposals.suggest("more") == Searcher.FINISHED


def test_a_trial_goes_on_as_another_of_tunes_after_one_death_and_has_failed_after_two(tunes: Any) -> None:
    tune = tunes()
    for error in (RayActorError(error_msg="gone"), RayActorError(error_msg="gone again")):
        trial = tune.ask()
        assert tune.experiment.numbers[trial.trial_id] == 0
        tune.lose(trial, error)
    assert tune.loop.records.lines[0]["error"] == (
        "The trial failed: its process died 2 times, the last time because gone again."
    )


def test_idle_processes_that_died_unnoticed_do_not_count_against_the_trial_that_was_to_have_them(tunes: Any) -> None:
    tune = tunes()
    for _ in range(3):
        trial = tune.ask()
        del tune.experiment.since_s[trial.trial_id]  # no task was sent to it
        tune.lose(trial, RayActorError())
    tune.lose(tune.ask(), RayActorError())
    assert tune.work(tune.ask()) == TrialScheduler.STOP
    assert tune.loop.records.lines[0]["status"] == "succeeded"


def test_a_trial_whose_processes_never_start_has_failed_at_last(tunes: Any) -> None:
    tune = tunes()
    while (trial := tune.ask()) is not None:
        del tune.experiment.since_s[trial.trial_id]
        tune.lose(trial, RayActorError(error_msg="ModuleNotFoundError: No module named 'tasks'"))
    assert "No module named 'tasks'" in tune.loop.records.lines[0]["error"]


def test_deaths_before_a_report_do_not_count_after_it(tunes: Any) -> None:
    space = {LR: make_dimension("choice", values=[0.1])}
    tune = tunes(make_method("median_stopping", space=space, trials=1, steps_per_trial=4, every_steps=1))
    tune.lose(tune.ask(), RayActorError())
    trial = tune.ask()
    assert tune.work(trial) == TrialScheduler.CONTINUE
    tune.lose(trial, RayActorError())
    trial = tune.ask()
    while tune.work(trial) == TrialScheduler.CONTINUE:
        pass
    assert tune.loop.records.lines[0]["status"] == "succeeded"


def test_a_failure_of_the_trial_itself_is_final_and_has_its_reason(tunes: Any) -> None:
    tune = tunes()
    trial = tune.ask()
    result = tune.loop.hosts[0].work(trial.given[-1])
    failed = TrialFailedError(type(result)(0, error="The loss became nan."))
    tune.lose(trial, RayTaskError("train", "the traceback", failed))
    assert tune.loop.records.lines[0]["error"] == "The loss became nan."
    assert tune.ask() is None


def test_a_process_that_was_killed_for_its_time_limit_is_not_started_again(tunes: Any) -> None:
    tune = tunes(time_limit_s=5.0)
    trial = tune.ask()
    tune.experiment.since_s[trial.trial_id] = time.monotonic() - 100.0
    tune.experiment.doomed[trial.trial_id] = "The trial ran out of its time limit of 5 s."
    tune.experiment.end_the_late([trial])
    tune.lose(trial, RayActorError())
    assert "time limit of 5 s" in tune.loop.records.lines[0]["error"]


def test_no_more_trials_than_allowed_are_in_processes_at_once(tunes: Any) -> None:
    space = {LR: make_dimension("choice", values=[0.1, 0.2, 0.3])}
    tune = tunes(make_method("grid", space=space, steps_per_trial=2), parallel=2)
    first, _ = tune.ask(), tune.ask()
    assert tune.ask() is None
    tune.work(first)
    assert tune.ask() is not None


def test_a_held_trial_gives_its_process_up_and_goes_on_when_it_is_released(tunes: Any) -> None:
    space = {LR: make_dimension("log_uniform", low=0.01, high=1.0)}
    population = {"population": 2, "interval_steps": 2, "synchronous": True}
    tune = tunes(make_method("population_based_training", space=space, trials=2, steps_per_trial=4, **population))
    first = tune.ask()
    assert tune.work(first) == TrialScheduler.NOOP
    assert first.is_paused
    second = tune.ask()
    while tune.work(second) == TrialScheduler.CONTINUE:
        assert tune.ask() is None, "there is no room"
    assert tune.ask() is None
    assert tune.decisions.choose_trial_to_run(tune) is first
    assert tune.experiment.tasks[first.trial_id].trial == 0


def test_a_search_whose_method_finds_in_being_asked_that_it_has_no_more_is_over_with_that_turn(tunes: Any) -> None:
    space = {LR: make_dimension("choice", values=[0.1, 0.3])}
    tune = tunes(make_method("bayesian", space=space, steps_per_trial=2, trials=9))
    for _ in range(2):
        tune.work(tune.ask())
    assert not tune.loop.conductor.is_over, "the method does not know yet"
    assert tune.proposals.suggest("more") == Searcher.FINISHED
    assert tune.experiment.failure is None


def test_so_is_one_whose_last_proposals_make_no_config(tunes: Any) -> None:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        if trial > 0:
            raise ConfigError("no config")
        return make_config(changes, genome, steps, trial)

    space = {LR: make_dimension("choice", values=[0.1, 0.3])}
    tune = tunes(make_method("grid", space=space, steps_per_trial=2), make=make)
    tune.work(tune.ask())
    assert tune.proposals.suggest("more") == Searcher.FINISHED
    assert tune.loop.records.lines[1]["status"] == "failed"
    assert tune.experiment.failure is None


def test_the_last_process_is_offered_once_nothing_is_left_to_do(tunes: Any) -> None:
    space = {LR: make_dimension("choice", values=[0.1, 0.3])}
    tune, offered = tunes(make_method("grid", space=space, steps_per_trial=2)), []
    tune.experiment._finish = lambda write: offered.append((tune.loop.conductor.is_over, write))
    tune.work(tune.ask())
    assert offered == []
    tune.work(tune.ask())
    assert [is_over for is_over, _ in offered] == [True]


def test_what_tune_was_made_with_is_pickled_without_the_search(tunes: Any) -> None:
    tune = tunes()
    for part in (tune.proposals, tune.decisions):
        assert cloudpickle.loads(cloudpickle.dumps(part)).experiment is None
