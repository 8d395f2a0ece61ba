"""A scheduler in a restored experiment, whose files a kill may have left at different states."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.search import ConcurrencyLimiter, Repeater

from orchestray.platform.errors import ConfigError
from orchestray.search import tune_scheduler, tune_searcher
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.tune.scheduler import MethodScheduler
from orchestray.search.tune.searcher import MethodSearcher
from support.method_cases import CASES
from support.tune_loop import State, TuneLoop


class Asking:
    """The state of Tune's requests for trials, which it keeps in a file."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"counter": 2, "finished": True, "total_samples": 3}

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


def searcher() -> MethodSearcher:
    space = {"lr": make_dimension("choice", values=[0.05, 0.1, 0.2])}
    return tune_searcher("asha", space, metric="accuracy", trials=3, steps_per_trial=24, grace_steps=8)


def added(scheduler: MethodScheduler, trial: Any) -> None:
    """Add a trial of a restored experiment."""
    scheduler.on_trial_add(SimpleNamespace(search_alg=Asking(), get_trials=lambda: [trial]), trial)


def result(step: int) -> dict[str, Any]:
    return {"accuracy": 0.5, "training_iteration": step}


def test_a_trial_that_only_tunes_file_knows_to_have_ended_has_ended_for_the_method_too(tmp_path: Path) -> None:
    for status, ended in ((Trial.TERMINATED, "succeeded"), (Trial.ERROR, "failed")):
        restored = searcher()
        scheduler = tune_scheduler(restored)
        config = restored.suggest("first")
        trial = SimpleNamespace(trial_id="first", config=config, status=status, last_result=result(24))
        added(scheduler, trial)
        standing = restored.session.trials[0]
        assert standing.ended is not None
        assert standing.ended.status == ended


def test_an_ended_trial_that_tune_trains_again_after_a_kill_comes_to_the_step_at_which_it_had_ended() -> None:
    restored = searcher()
    scheduler = tune_scheduler(restored)
    trial: Any = SimpleNamespace(trial_id="first", config=restored.suggest("first"), status=Trial.RUNNING)
    restored.on_trial_complete("first", result(24))  # as the searcher's file says, which is newer
    added(scheduler, trial)
    decisions = [scheduler.on_trial_result(None, trial, result(step)) for step in (1, 23, 24)]
    assert decisions == ["CONTINUE", "CONTINUE", "STOP"]


def test_trials_that_only_a_newer_file_had_counted_are_asked_for_again(tmp_path: Path) -> None:
    before = searcher()
    before.is_scheduled = True
    config = before.suggest("first")
    before.save(str(tmp_path / "saved"))
    restored = searcher()
    scheduler = tune_scheduler(restored)
    restored.restore(str(tmp_path / "saved"))
    first: Any = SimpleNamespace(trial_id="first", config=config, status=Trial.PENDING)
    asking = Asking()
    scheduler.on_trial_add(SimpleNamespace(search_alg=asking, get_trials=lambda: [first]), first)
    assert asking.state == {"counter": 1, "finished": False, "total_samples": 3}
    assert restored.suggest("second") not in (None, "FINISHED")


@pytest.mark.parametrize("around", [partial(ConcurrencyLimiter, max_concurrent=2), partial(Repeater, repeat=2)])
def test_a_scheduler_of_what_is_around_a_searcher_is_refused_with_what_to_give_it(around: Any) -> None:
    wrapped = around(searcher())
    with pytest.raises(ConfigError, match=f"got a {type(wrapped).__name__}; if that is around .* the one inside"):
        tune_scheduler(wrapped)


def test_tune_keeps_no_results_back_from_a_scheduler_that_may_hold_the_trial() -> None:
    assert not tune_scheduler(searcher()).supports_buffered_results


SYNCHRONOUS = "population_based_training, synchronous"


def searcher_of(name: str) -> MethodSearcher:
    return MethodSearcher(CASES[name].make, metric="score", time="training_iteration")


class SlowPauses(TuneLoop):
    """A Tuner that pauses a trial when its checkpoint is written, some events later, as Tune does."""

    def __init__(self, searcher: MethodSearcher) -> None:
        super().__init__(searcher)
        self._due: dict[str, int] = {}
        """Maps a trial whose checkpoint is being written to the event at which it is paused."""

    def pause_trial(self, trial: Trial, should_checkpoint: bool = True) -> None:
        self._due[trial.trial_id] = self.num_events + 3

    def stop_trial(self, trial: Trial) -> None:
        assert trial.trial_id not in self._due, "its checkpoint is being written"
        super().stop_trial(trial)

    def _of(self, *statuses: str) -> list[Trial]:
        found = super()._of(*statuses)
        return [trial for trial in found if trial.trial_id not in self._due or len(statuses) > 1]

    def _event(self) -> None:
        super()._event()
        for trial in self.trials:
            if self._due.get(trial.trial_id) == self.num_events:
                del self._due[trial.trial_id]
                super().pause_trial(trial)

    def _begin(self, trial: Trial) -> None:
        super()._begin(trial)
        number = self.searcher.numbers[trial.trial_id]
        standing = self.searcher.session.trials[number]
        assert self.begun_from[number][-1] == State(standing.step, standing.at)


@pytest.mark.parametrize("name", ["asha", "omnivore", "population_based_training", SYNCHRONOUS])
def test_a_trial_that_is_let_go_while_its_pause_is_under_way_is_left_alone_until_it_is_paused(name: str) -> None:
    loop = SlowPauses(searcher_of(name)).run()
    assert all(standing.ended is not None for standing in loop.searcher.session.trials.values())


class SavesItself(TuneLoop):
    """A Tuner with `checkpoint_frequency=1`, which saves each result before the scheduler hears of it."""

    def _decide(self, trial: Trial, result: dict[str, Any]) -> str:
        self._schedule_trial_save(trial)
        self._saving = None
        return super()._decide(trial, result)


def test_where_only_the_trainable_saves_a_trial_goes_on_from_the_last_checkpoint_of_the_one_it_copies() -> None:
    loop = SavesItself(searcher_of(SYNCHRONOUS))
    loop.scheduler = tune_scheduler(loop.searcher, saves_reports=False)
    loop.run()
    copies = [standing for standing in loop.searcher.session.trials.values() if standing.taken]
    assert copies
    for standing in copies:
        begun = loop.begun_from[standing.proposal.trial]
        assert {step for step, _ in standing.taken} <= {state.step for state in begun}


def test_a_scheduler_keeps_no_checkpoints_that_no_trial_goes_on_from() -> None:
    saved: list[weakref.ref[Any]] = []

    class Counting(TuneLoop):
        def _schedule_trial_save(self, trial: Trial, result: dict[str, Any] | None = None) -> Any:
            made = super()._schedule_trial_save(trial, result)
            saved.append(weakref.ref(made))
            return made

    loop = Counting(searcher_of(SYNCHRONOUS)).run()
    gc.collect()
    kept = sum(one() is not None for one in saved)
    assert kept <= 2 * len(loop.trials) < len(saved)
