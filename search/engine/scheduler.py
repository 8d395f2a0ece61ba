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
            saves_reports: have every trial save a checkpoint with each report that the method hears, for others.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        searcher.is_scheduled = True
        self._searcher, self._saves_reports = searcher, saves_reports
        self._trials: dict[int, Trial] = {}
        self._waiting: set[int] = set()
        self._saved: dict[tuple[int, int], Any] = {}
        """By (trial, report) the checkpoints that others may take, or what comes to be them."""
        self._asked: tuple[int, int] | None = None
        """When it last was seen that all trials are held, how often Tune had asked for trials, and how often it was
        given one; None: some were not held."""

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """It decides by what its searcher was told."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        number = self._searcher.numbers[trial.trial_id]
        self._trials[number] = trial
        standing = self._searcher.director.trials[number]
        if standing.ended is not None or not standing.num_reports:
            return
        # A restored Tuner begins what was held, and what was to become another and has not yet, just as it was.
        is_behind = len(standing.taken) > self._searcher.followed.get(number, 0)
        if isinstance(standing.decision, Wait) or is_behind:
            self._waiting.add(number)
        at = (number, standing.num_reports) if is_behind else standing.at
        if at is not None and trial.latest_checkpoint_result is not None:
            self._saved.setdefault(at, trial.latest_checkpoint_result)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        number, director = self._searcher.numbers[trial.trial_id], self._searcher.director
        if number in self._waiting:
            return TrialScheduler.PAUSE
        if self._searcher.hear(trial.trial_id, result) is None:
            return TrialScheduler.CONTINUE
        decision = director.trials[number].decision
        if self._saves_reports:
            self._save(tune_controller, trial, result)
        if end_of(director, number) is not None:
            return TrialScheduler.STOP
        if isinstance(decision, Wait | Become):  # it becomes another once it is held: others may take what it is now
            self._waiting.add(number)
            return TrialScheduler.PAUSE
        return TrialScheduler.CONTINUE

    def _save(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Have Tune save a checkpoint; those of other reports that nobody goes on from are forgotten."""
        director = self._searcher.director
        number = self._searcher.numbers[trial.trial_id]
        self._saved[number, director.trials[number].num_reports] = tune_controller._schedule_trial_save(
            trial, result=result
        )
        wanted = {director.trials[live].at for live in director.live}
        self._saved = {at: saved for at, saved in self._saved.items() if at in wanted}

    def _become(self, number: int, decision: Become) -> None:
        trial = self._trials[number]
        trial.set_config({**trial.config, **decision.changes})
        standing = self._searcher.director.trials[number]
        self._searcher.followed[number] = len(standing.taken)
        if decision.source == number:
            return
        at = standing.origin or (decision.source, 0)
        result = self._checkpoint_of(at, decision.source)
        if result is None or result.checkpoint is None:  # of a function that reports none: it would begin again
            raise TrainingError(
                f"Trial {number} is to go on as trial {decision.source}, which has saved no checkpoint: for this "
                "method a trainable needs save_checkpoint and load_checkpoint, and tune_scheduler saves_reports=True."
            )
        self._saved[at] = result
        manager: Any = trial.run_metadata.checkpoint_manager
        manager._latest_checkpoint_result = result

    def _checkpoint_of(self, at: tuple[int, int], source: int) -> _TrainingResult | None:
        """Of a report; where only the trainable saves, the last that Tune knows of the source."""
        saved = self._saved.get(at)
        result: _TrainingResult | None = saved if isinstance(saved, _TrainingResult | None) else saved.resolve()
        if result is None and source in self._trials:
            result = self._trials[source].latest_checkpoint_result
        return result

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """
        Raises:
            TrainingError: all trials are held until there are more, which Tune does not ask for or the method does not
                propose.
        """
        if self._release(tune_controller):
            self._asked = None  # the end of one may let others go on, which is seen the next time
        else:
            self._check_goes_on()
        trials = list(self._trials.items())
        pending = next((trial for _, trial in trials if trial.status == Trial.PENDING), None)
        paused = (trial for number, trial in trials if trial.status == Trial.PAUSED and number not in self._waiting)
        return pending or next(paused, None)

    def _release(self, tune_controller: Any) -> bool:
        """See which of the trials that wait go on, or end; returns whether any does."""
        before = len(self._waiting)
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
        return len(self._waiting) < before

    def _check_goes_on(self) -> None:
        """Refuse to wait for ever.

        Tune asks for trials before each call of this, unless it wants no more of them; and a method that has none to
        propose while nothing is under way hears of nothing that would change it.
        """
        held = [number for number, trial in self._trials.items() if trial.status == Trial.PAUSED]
        under_way = [trial for trial in self._trials.values() if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if under_way or not held or not self._waiting.issuperset(held):
            self._asked = None
            return
        before, self._asked = self._asked, (self._searcher.num_asked, len(self._searcher.numbers))
        if before is None or before[1] != self._asked[1]:
            return
        if before[0] != self._asked[0] or self._searcher.director.is_done:
            raise TrainingError(
                f"{self._searcher.name} holds all {len(held)} trials and proposes no others; it is stuck. Its `ask` "
                "has to propose one, or its `released` to let one go."
            )
        raise TrainingError(
            f"All {len(held)} trials are held until others have come as far, and Tune starts no others: it counts "
            "those that are held. Take max_concurrent_trials out of the TuneConfig (resources say how many run at "
            "once), and let num_samples be -1."
        )

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._over(trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def _over(self, trial: Trial) -> None:
        """Others may still take the checkpoint of a trial that has ended."""
        number = self._searcher.numbers[trial.trial_id]
        if trial.checkpoint is not None:
            self._searcher.checkpoints[number] = trial.checkpoint.path
        self._waiting.discard(number)
        self._trials.pop(number, None)

    def debug_string(self) -> str:
        return f"{self._searcher.name} of orchestray"


def tune_scheduler(searcher: MethodSearcher, *, saves_reports: bool | None = None) -> MethodScheduler:
    """The decisions of a searcher's method as a Ray Tune scheduler.

    For example population-based training of a class with `save_checkpoint` and `load_checkpoint`:

        searcher = tune_searcher("population_based_training", space, metric="score", population=4, trials=4,
                                 steps_per_trial=100, interval_steps=5)
        tune.Tuner(MyTrainable, tune_config=tune.TuneConfig(
            search_alg=searcher, scheduler=tune_scheduler(searcher), num_samples=4, reuse_actors=True)).fit()

    Args:
        searcher: made by `tune_searcher`.
        saves_reports: have each trial save a checkpoint with every report that the method hears, for others to take;
            default: where trials take the states of others (`population_based_training`, `omnivore`,
            `large_scale_evolution` with `inherit_weights`).
    """
    wanted = searcher.director.method.hands_on if saves_reports is None else saves_reports
    return MethodScheduler(searcher, saves_reports=wanted)
