"""The decisions of a search method as an ordinary Ray Tune scheduler, for a user's own `tune.Tuner`."""

from __future__ import annotations

from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from orchestray.platform.cluster import ray_internals
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.search.engine.session import end_of
from orchestray.search.methods.base import Decision, Exploit, Pause, Stop
from orchestray.search.tune.searcher import MethodSearcher


class MethodScheduler(TrialScheduler):
    """A scheduler that carries out the decisions of a searcher's method: stops, pauses and exploits trials."""

    _supports_buffered_results = False

    def __init__(self, searcher: MethodSearcher, *, saves_reports: bool) -> None:
        """
        Args:
            searcher: searcher whose method decides.
            saves_reports: True to have every trial save a checkpoint with each report to the method, for others to take
                over.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        searcher.is_scheduled = True
        self._searcher, self._saves_reports = searcher, saves_reports
        self._trials: dict[int, Trial] = {}
        self._waiting: set[int] = set()
        self._saved: dict[tuple[int, int], Any] = {}
        """Maps (trial, report) to a checkpoint that others may take over, or to a pending save of it."""
        self._asked: tuple[int, int] | None = None
        """Counts when all trials were last seen paused: how often Tune had asked for a trial, and how many it had
        received; None: never.
        """

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Return True if the properties are the searcher's.

        Raises:
            ConfigError: they are others.
        """
        self._searcher.check_goal(metric, mode)
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        number = self._searcher.adopt(trial.trial_id, trial.config)
        if not self._searcher.num_asked:  # a trial of a restored experiment
            _ask_again(tune_controller)
        if number is None:
            return
        self._trials[number] = trial
        standing = self._searcher.session.trials[number]
        if trial.status in (Trial.TERMINATED, Trial.ERROR):  # the searcher may have been saved before that
            is_error = trial.status == Trial.ERROR
            self._searcher.on_trial_complete(trial.trial_id, trial.last_result, error=is_error)
        if standing.ended is not None or not standing.num_reports:
            return
        # A restored Tuner keeps trials paused that were paused, or whose exploit was decided but not carried out.
        is_behind = len(standing.taken) > self._searcher.followed.get(number, 0)
        if isinstance(standing.decision, Pause) or is_behind:
            self._waiting.add(number)
        at = (number, standing.num_reports) if is_behind else standing.at
        if at is not None and trial.latest_checkpoint_result is not None:
            self._saved.setdefault(at, trial.latest_checkpoint_result)

    def _number(self, trial: Trial) -> int | None:
        """Return the number of a trial; None if it is none of the method's: Tune has restarted it."""
        return self._searcher.numbers.get(trial.trial_id)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        number, session = self._number(trial), self._searcher.session
        ended = None if number is None else session.trials[number].ended
        if number is None or (ended is not None and ended.status == "failed"):  # restarted: restart_errored of Tune
            budget = session.method.steps_per_trial if number is None else session.budget(number)
            is_over = int(result.get(self._searcher.time, 0)) >= budget
            return TrialScheduler.STOP if is_over else TrialScheduler.CONTINUE
        standing = session.trials[number]
        is_behind = int(result.get(self._searcher.time, standing.step)) < standing.step
        if is_behind and not session.method.hands_on:  # trained again after a kill
            return TrialScheduler.CONTINUE
        if standing.ended is not None:
            return TrialScheduler.STOP
        if number in self._waiting:
            return TrialScheduler.PAUSE
        if self._searcher.hear(trial.trial_id, result) is None:
            return TrialScheduler.CONTINUE if end_of(session, number) is None else TrialScheduler.STOP
        decision = session.trials[number].decision
        if self._saves_reports:
            self._save(tune_controller, trial, result)
        if end_of(session, number) is not None:
            return TrialScheduler.STOP
        if isinstance(decision, Pause | Exploit):  # an exploit waits for the pause: others may need the current state
            self._waiting.add(number)
            return TrialScheduler.PAUSE
        return TrialScheduler.CONTINUE

    def _save(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Have Tune save a checkpoint, and forget those of reports that no trial continues from."""
        session = self._searcher.session
        number = self._searcher.numbers[trial.trial_id]
        saved = ray_internals.save_now(tune_controller, trial, result)
        self._saved[number, session.trials[number].num_reports] = saved
        wanted = {session.trials[live].at for live in session.live}
        self._saved = {at: saved for at, saved in self._saved.items() if at in wanted}

    def _become(self, number: int, decision: Exploit) -> None:
        trial = self._trials[number]
        trial.set_config({**trial.config, **decision.changes})
        standing = self._searcher.session.trials[number]
        self._searcher.followed[number] = len(standing.taken)
        if decision.source == number:
            return
        at = standing.origin or (decision.source, 0)
        result = self._checkpoint_of(at, decision.source)
        if result is None or result.checkpoint is None:  # a function that reports no checkpoint would start again
            raise TrainingError(
                f"Trial {number} is to go on as trial {decision.source}, which has saved no checkpoint: for this "
                "method a trainable needs save_checkpoint and load_checkpoint, and tune_scheduler saves_reports=True."
            )
        self._saved[at] = result
        ray_internals.restore_from(trial, result)

    def _checkpoint_of(self, at: tuple[int, int], source: int) -> Any:
        """Return Tune's result with the checkpoint of a report; if only the trainable saves, the last of the source."""
        saved: Any = self._saved.get(at)
        result = saved.resolve() if hasattr(saved, "resolve") else saved  # a save may be under way
        if result is None and source in self._trials:
            result = self._trials[source].latest_checkpoint_result
        return result

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return a pending or released trial to run, or None.

        Raises:
            TrainingError: all trials are paused until more arrive, which Tune does not request or the method does not
                propose.
        """
        if not self._release(tune_controller):  # the end of one trial may release others, which the next call sees
            self._check_goes_on()
        trials = list(self._trials.items())
        pending = next((trial for _, trial in trials if trial.status == Trial.PENDING), None)
        paused = (trial for number, trial in trials if trial.status == Trial.PAUSED and number not in self._waiting)
        return pending or next(paused, None)

    def _release(self, tune_controller: Any) -> bool:
        """Continue or end the paused trials that are due; return True if there was any."""
        before = len(self._waiting)
        for number in sorted(self._waiting):
            decision: Decision | None = self._searcher.session.trials[number].decision
            trial = self._trials[number]
            if isinstance(decision, Pause) or trial.status != Trial.PAUSED:
                continue
            self._waiting.discard(number)
            if isinstance(decision, Stop) or end_of(self._searcher.session, number) is not None:
                tune_controller.stop_trial(trial)
            elif isinstance(decision, Exploit):
                self._become(number, decision)
        return len(self._waiting) < before

    def _check_goes_on(self) -> None:
        """Raise an error instead of waiting forever.

        Tune requests trials before each call of this, unless it wants no more of them. A method that has none to
        propose while no trial is running receives nothing that could change that.
        """
        held = [number for number, trial in self._trials.items() if trial.status == Trial.PAUSED]
        under_way = [trial for trial in self._trials.values() if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if under_way or not held or not self._waiting.issuperset(held):
            return
        before, self._asked = self._asked, (self._searcher.num_asked, len(self._searcher.numbers))
        if before is None or before[1] != self._asked[1]:
            return
        if before[0] != self._asked[0] or self._searcher.session.is_done:
            raise TrainingError(
                f"{self._searcher.name} holds all {len(held)} trials and proposes no others; it is stuck. Its `ask` "
                "has to propose one, or its `released` to let one go."
            )
        raise TrainingError(
            f"All {len(held)} trials are held until others have come as far, and Tune starts no others: it counts "
            "those that are held. Take max_concurrent_trials out of the TuneConfig, and the searcher out of a "
            "ConcurrencyLimiter (resources say how many run at once), and let num_samples be -1."
        )

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        self._over(trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._over(trial)

    def _over(self, trial: Trial) -> None:
        """Forget an ended trial, but remember its checkpoint, which others may still take over."""
        number = self._number(trial)
        if number is None:
            return
        if trial.checkpoint is not None:
            self._searcher.checkpoints[number] = trial.checkpoint.path
        self._waiting.discard(number)
        self._trials.pop(number, None)

    def debug_string(self) -> str:
        return f"{self._searcher.name} of orchestray"


def _ask_again(tune_controller: Any) -> None:
    """Have Tune ask for the trials that its file lacks, though its count of them, in another file, may be newer."""
    asks = tune_controller.search_alg
    asks.set_state({**asks.get_state(), "counter": len(tune_controller.get_trials()), "finished": False})


def tune_scheduler(searcher: MethodSearcher, *, saves_reports: bool | None = None) -> MethodScheduler:
    """Return the decisions of a searcher's method as a Ray Tune scheduler.

    For example population-based training of a class with `save_checkpoint` and `load_checkpoint`:

        searcher = tune_searcher("population_based_training", space, metric="score", population=4, trials=4,
                                 steps_per_trial=100, interval_steps=5)
        tune.Tuner(MyTrainable, tune_config=tune.TuneConfig(
            search_alg=searcher, scheduler=tune_scheduler(searcher), num_samples=4, reuse_actors=True)).fit()

    Args:
        searcher: made by `tune_searcher`.
        saves_reports: True to have each trial save a checkpoint with every report to the method, for others to take
            over; default: only for methods whose trials take over states (`population_based_training`, `omnivore`,
            `large_scale_evolution` with `inherit_weights`).

    Raises:
        ConfigError: the searcher is another one, such as Tune's `ConcurrencyLimiter` around it.
    """
    if not isinstance(searcher, MethodSearcher):
        raise ConfigError(
            f"tune_scheduler: searcher: must be what tune_searcher returns, got a {type(searcher).__name__}; if that "
            "is around such a searcher, give tune_scheduler the one inside"
        )
    wanted = searcher.session.method.hands_on if saves_reports is None else saves_reports
    return MethodScheduler(searcher, saves_reports=wanted)
