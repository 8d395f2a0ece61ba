"""The decisions of a method of search as an ordinary Ray Tune scheduler, for a user's own `tune.Tuner`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.train._internal.session import _TrainingResult
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from orchestray.platform.errors import TrainingError
from orchestray.search.engine.director import end_of
from orchestray.search.methods.base import Become, Decision, Stop, Wait

if TYPE_CHECKING:
    from orchestray.search.engine.searcher import MethodSearcher


class MethodScheduler(TrialScheduler):
    """Follows what the method of a searcher decides: stops trials, holds them, has one take another's checkpoint."""

    _supports_buffered_results = False

    def __init__(self, searcher: MethodSearcher, *, saves_reports: bool) -> None:
        """
        Args:
            searcher: whose method decides.
            saves_reports: have every trial save a checkpoint with each report, for others to take.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        searcher.is_scheduled = True
        self._searcher, self._saves_reports = searcher, saves_reports
        self._trials: dict[int, Trial] = {}
        self._waiting: set[int] = set()
        self._saved: dict[int, Any] = {}
        """Of each trial the checkpoint of its last report, or what comes to be it."""

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """It decides by what its searcher was told."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        self._trials[self._searcher.numbers[trial.trial_id]] = trial

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        number, director = self._searcher.numbers[trial.trial_id], self._searcher.director
        if self._searcher.hear(trial.trial_id, result) is None:
            return TrialScheduler.CONTINUE
        decision = director.trials[number].decision
        if end_of(director, number) is not None:
            return TrialScheduler.STOP
        if self._saves_reports:
            self._saved[number] = tune_controller._schedule_trial_save(trial, result=result)
        if isinstance(decision, Wait):
            self._waiting.add(number)
            return TrialScheduler.PAUSE
        if isinstance(decision, Become):
            tune_controller.pause_trial(trial, should_checkpoint=decision.source == number)
            self._become(number, decision)
            return TrialScheduler.NOOP
        return TrialScheduler.CONTINUE

    def _become(self, number: int, decision: Become) -> None:
        trial = self._trials[number]
        trial.set_config({**trial.config, **decision.changes})
        if decision.source == number:
            return
        saved = self._saved.get(decision.source)
        result = saved if saved is None or isinstance(saved, _TrainingResult) else saved.resolve()
        if result is None:
            raise TrainingError(
                f"Trial {number} is to go on as trial {decision.source}, which has saved no checkpoint: a trainable "
                "needs save_checkpoint and load_checkpoint for this method, and tune_scheduler saves_reports=True."
            )
        self._saved[decision.source] = result
        manager: Any = trial.run_metadata.checkpoint_manager
        manager._latest_checkpoint_result = result

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        self._release(tune_controller)
        trials = list(self._trials.items())
        pending = next((trial for _, trial in trials if trial.status == Trial.PENDING), None)
        paused = (trial for number, trial in trials if trial.status == Trial.PAUSED and number not in self._waiting)
        return pending or next(paused, None)

    def _release(self, tune_controller: Any) -> None:
        """See which of the trials that wait go on, or end."""
        for number in sorted(self._waiting):
            decision: Decision | None = self._searcher.director.trials[number].decision
            trial = self._trials[number]
            if isinstance(decision, Wait) or trial.status != Trial.PAUSED:
                continue
            self._waiting.discard(number)
            if isinstance(decision, Stop) or end_of(self._searcher.director, number) is not None:
                tune_controller.stop_trial(trial)
            elif isinstance(decision, Become):
                self._become(number, decision)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._over(trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def _over(self, trial: Trial) -> None:
        """Others may still take the checkpoint of a trial that has ended."""
        number = self._searcher.numbers[trial.trial_id]
        self._waiting.discard(number)
        self._trials.pop(number, None)

    def debug_string(self) -> str:
        return f"{type(self._searcher.director.method).__name__} of orchestray"


def tune_scheduler(searcher: MethodSearcher, *, saves_reports: bool | None = None) -> MethodScheduler:
    """The decisions of a searcher's method as a Ray Tune scheduler.

    For example population-based training of a class with `save_checkpoint` and `load_checkpoint`:

        searcher = tune_searcher("population_based_training", space, metric="score", population=4, trials=4,
                                 steps_per_trial=100, interval_steps=5)
        tune.Tuner(MyTrainable, tune_config=tune.TuneConfig(
            search_alg=searcher, scheduler=tune_scheduler(searcher), num_samples=4, reuse_actors=True)).fit()

    Args:
        searcher: made by `tune_searcher`.
        saves_reports: have each trial save a checkpoint with every report, for others to take; default: for
            population-based training.
    """
    name = type(searcher.director.method).__name__
    wanted = name == "PopulationBasedTraining" if saves_reports is None else saves_reports
    return MethodScheduler(searcher, saves_reports=wanted)
