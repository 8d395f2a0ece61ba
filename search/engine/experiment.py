"""A search as an experiment of Ray Tune: its trials are Tune's, and the search's controller decides about them.

Tune asks `Proposals` for trials, passes results to `Decisions`, and reports to `Watcher`; all three share an
`Experiment`. A trial that goes on after its process was lost is another trial to Tune, with the same name.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial
from ray.tune.result import SHOULD_CHECKPOINT
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from orchestray.platform.actors.death_cause import cause_of
from orchestray.platform.errors import NodeLeavesError, OrchestrayError
from orchestray.search.engine.session import SearchError
from orchestray.search.engine.trainable import ANSWER, TrialFailedError

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.search.engine.controller import SearchController
    from orchestray.search.engine.messages import TrialLimits, TrialResult, TrialTask
    from orchestray.search.engine.start_throttle import StartThrottle

_LOSSES = 2
"""Number of deaths of its process, between two reports, after which a trial has failed."""
_MOST_STARTS = 5
"""Number of processes that may die before a trial is in them, idle ones for example; then the trial has failed."""
_LEAVE_S = 60.0
"""Seconds within which the last process must have written the run of the best trial."""
GRACE_S = 10.0
"""Seconds after its time limit within which a trial must notice it."""


WriteRun = Callable[["TrialTask", "Path"], "TrialResult"]
"""Function that writes the run of a trial into a directory."""


class Experiment:
    """The state that the parts of a search in Tune share.

    Attributes:
        failure: error that ends the search; None: there is none.
        was_stopped: True if the user has stopped the search.
    """

    def __init__(
        self,
        controller: SearchController,
        limits: TrialLimits,
        throttle: StartThrottle,
        *,
        stop: threading.Event | None = None,
        deadline_s: float = math.inf,
        look: Callable[[Experiment], None] = lambda _experiment: None,
        finish: Callable[[WriteRun], None] = lambda _write: None,
    ) -> None:
        """
        Args:
            controller: controller of the search.
            limits: limits of its trials.
            throttle: limit on the trials that run at once.
            stop: set when the user stops the search.
            deadline_s: monotonic time at which the search ends.
            look: called after each turn of Tune.
            finish: called when nothing is left to do, with the last process as a writer of runs.
        """
        self.controller, self.limits, self.throttle = controller, limits, throttle
        self.failure: OrchestrayError | None = None
        self.was_stopped = False
        self.tasks: dict[str, TrialTask] = {}
        """Next task of each trial in a process or on the way to one, by Tune's id."""
        self.since_s: dict[str, float] = {}
        """Monotonic time at which each process got its last task, by Tune's id of the trial."""
        self.held: dict[int, Trial] = {}
        """Trials that Tune has paused, by number."""
        self.released: deque[Trial] = deque()
        """Those of them that are to go on."""
        self.losses: Counter[int] = Counter()
        """Deaths of the processes of each trial since its last report."""
        self.starts: Counter[int] = Counter()
        """Deaths of processes that were to have each trial, since its last report."""
        self.doomed: dict[str, str] = {}
        """Reasons why processes were killed on purpose, by Tune's id of the trial."""
        self.processes: dict[str, Any] = {}
        """Processes in the middle of a task, by Tune's id of the trial."""
        self.has_stopped = False
        """True if Tune has stopped all trials, as the search is cut."""
        self.numbers: dict[str, int] = {}
        """Number of each trial, by Tune's id."""
        self.names: Counter[int] = Counter()
        """Number of Tune's trials for each trial."""
        self._stop, self._deadline_s, self._look, self._finish = stop, deadline_s, look, finish

    def __reduce__(self) -> Any:
        # Tune pickles what it was made with, to restore an experiment; a search is resumed from its journal instead.
        return _detached, ()

    def attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the controller, and keep an error that ends the search: Tune would wrap it."""
        try:
            return call(*arguments)
        except OrchestrayError as error:
            self.failure = self.failure or error
        except Exception as error:  # noqa: BLE001 - raised again when Tune has ended
            self.failure = self.failure or _unexpected(error)
        return None

    def is_cut(self) -> bool:
        """Return True if Tune is to end all trials where they are."""
        self.was_stopped |= self._stop is not None and self._stop.is_set()
        return self.failure is not None or self.was_stopped or time.monotonic() > self._deadline_s

    def should_end(self) -> bool:
        """Return True if no further trial is to begin."""
        return self.is_cut() or self.controller.is_over

    def next_task(self) -> TrialTask | None:
        """Return the first task of a trial without a process; None if there is none now.

        Trials that Tune holds go into `released` instead.
        """
        controller = self.controller
        while self.throttle.has_room() and (number := controller.next_trial()) is not None:
            if (trial := self.held.pop(number, None)) is not None:
                self.throttle.began(trial.trial_id)
                self.released.append(trial)
                continue
            if (task := controller.first_task(number)) is not None:
                return task
        return None

    def values_of(self, number: int) -> dict[str, Any]:
        """Return the values of the space that a trial has now."""
        standing = self.controller.session.trials[number]
        genome = standing.proposal.genome
        return {**standing.changes, **({} if genome is None else {"genome": genome})}

    def send(self, trial: Trial, task: TrialTask) -> None:
        """Send a task to a trial's process. Ray carries it out before the `train` that Tune sends next."""
        values = self.values_of(task.trial)
        self.since_s[trial.trial_id] = time.monotonic()
        actor: Any = trial.temporary_state.ray_actor
        self.processes[trial.trial_id] = actor
        actor.give.remote(task, values)

    def left(self, trial: Trial) -> None:
        """Record that a trial has no process any more."""
        self.throttle.left(trial.trial_id)
        self.tasks.pop(trial.trial_id, None)
        self.since_s.pop(trial.trial_id, None)
        self.processes.pop(trial.trial_id, None)

    def lost(self, trial: Trial, cause: str, *, was_in_it: bool, counts: bool = True) -> None:
        """Record the death of a trial's process; the trial goes on in another unless it was killed on purpose.

        Args:
            trial: the trial.
            cause: cause of the death.
            was_in_it: True if the process had begun with the trial.
            counts: False if it has ended on purpose, with the state of the trial saved.
        """
        number = self.numbers[trial.trial_id]
        if trial.trial_id in self.doomed:
            self.attempt(self.controller.failed, number, self.doomed.pop(trial.trial_id))
            return
        deaths, most = (self.losses, _LOSSES) if was_in_it else (self.starts, _MOST_STARTS)
        deaths[number] += counts
        if deaths[number] < most:
            self.attempt(self.controller.lost, number)
            return
        text = f"The trial failed: its process died {most} times, the last time because {cause}."
        self.attempt(self.controller.failed, number, text)

    def end_the_late(self, trials: list[Trial]) -> None:
        """Kill processes whose trial is far beyond its time limit, since it cannot be stopped in another way."""
        limit_s = self.limits.time_limit_s
        if limit_s is None:
            return
        for trial in trials:
            since_s, actor = self.since_s.get(trial.trial_id), trial.temporary_state.ray_actor
            if since_s is None or actor is None or trial.trial_id in self.doomed:
                continue
            if time.monotonic() - since_s > limit_s + GRACE_S:
                self.doomed[trial.trial_id] = f"The trial ran out of its time limit of {limit_s:g} s."
                ray.kill(actor)

    def end_the_cut(self) -> None:
        """Kill processes that are in the middle of a task although Tune has stopped their trials, as the search is cut.

        Tune waits ten seconds for such a process before it kills it, and drops what it reports in them.
        """
        if self.has_stopped:
            for process in self.processes.values():
                ray.kill(process)
            self.processes.clear()

    def finish(self, trial: Trial) -> None:
        """Let the search use the process of its last trial, which has all that the run of the best needs."""
        actor: Any = trial.temporary_state.ray_actor

        def write(task: TrialTask, directory: Path) -> TrialResult:
            result: TrialResult = ray.get(actor.leave_run.remote(task, str(directory)), timeout=_LEAVE_S)
            return result

        with contextlib.suppress(OrchestrayError, ray.exceptions.RayError):  # then the search writes it itself
            self._finish(write)

    def look(self) -> None:
        """Let the search look after its logs and its place, once in each turn of Tune."""
        self._look(self)


class Proposals(Searcher):
    """The trials of a search, as Tune asks for them."""

    def __init__(self, experiment: Experiment, metric: str, mode: str) -> None:
        super().__init__(metric=metric, mode=mode)
        self.experiment = experiment

    def suggest(self, trial_id: str) -> Any:
        """Return the values of a trial; None if none is due now, `Searcher.FINISHED` at the end."""
        experiment = self.experiment
        if experiment.should_end():
            return Searcher.FINISHED
        task = experiment.attempt(experiment.next_task)
        if task is None:
            self._check_goes_on()
            return Searcher.FINISHED if experiment.should_end() else None
        experiment.numbers[trial_id] = task.trial
        experiment.names[task.trial] += 1
        experiment.tasks[trial_id] = task
        experiment.throttle.began(trial_id)
        return experiment.values_of(task.trial)

    def _check_goes_on(self) -> None:
        experiment = self.experiment
        if not (experiment.tasks or experiment.released or experiment.should_end()):
            experiment.failure = SearchError("The method proposes no further trial and waits for none; it is stuck.")

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: `Decisions` has heard of it."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the search's journal has everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, see `save`."""


class Decisions(TrialScheduler):
    """The decisions about a search's trials, as Tune carries them out."""

    _supports_buffered_results = False

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        self.experiment = experiment

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Accept the properties unchanged: the controller knows the objectives."""
        return True

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        experiment, answer = self.experiment, result[ANSWER]
        experiment.throttle.answered()
        for deaths in (experiment.losses, experiment.starts):
            deaths.pop(answer.trial, None)
        further = experiment.attempt(experiment.controller.receive, answer)
        if further is not None:
            if further.config is not None:
                trial.set_config(experiment.values_of(answer.trial))
            experiment.send(trial, further)
            return TrialScheduler.CONTINUE
        if experiment.failure is None and experiment.controller.is_over:
            experiment.finish(trial)
        experiment.left(trial)
        if experiment.failure is None and experiment.controller.session.trials[answer.trial].ended is None:
            experiment.held[answer.trial] = trial
            tune_controller.pause_trial(trial, should_checkpoint=False)  # its state is in the search's own files
            return TrialScheduler.NOOP
        return TrialScheduler.STOP

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        experiment = self.experiment
        was_in_it = trial.trial_id in experiment.since_s
        experiment.left(trial)
        error = _error_of(trial)
        raised = getattr(error, "cause", None)
        if isinstance(raised, TrialFailedError):
            experiment.attempt(experiment.controller.receive, raised.result)
        else:
            cause = "its process was lost" if error is None else cause_of(error)
            counts = not isinstance(raised, NodeLeavesError)
            experiment.lost(trial, cause, was_in_it=was_in_it, counts=counts)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return a held trial that is to go on; new ones start in their order."""
        experiment, controller = self.experiment, self.experiment.controller
        for number, trial in list(experiment.held.items()):
            if controller.session.trials[number].ended is not None:
                del experiment.held[number]
                tune_controller.stop_trial(trial)
        while experiment.released:
            trial = experiment.released.popleft()
            number = experiment.numbers[trial.trial_id]
            task = experiment.attempt(controller.first_task, number)
            if task is None:
                experiment.left(trial)
                tune_controller.stop_trial(trial)
                continue
            experiment.tasks[trial.trial_id] = task
            trial.set_config(experiment.values_of(number))
            return trial
        return None

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Do nothing: `Proposals` has proposed it."""

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Do nothing: it ends by a decision."""

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Do nothing, see `on_trial_complete`."""

    def debug_string(self) -> str:
        return "orchestray"


class Watcher(Callback):
    """The first of Tune's callbacks: it gives processes their tasks, and results the form that others see."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._saved: dict[int, Trial] = {}
        """Trials with a checkpoint of Tune's, by number."""

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.experiment.send(trial, self.experiment.tasks[trial.trial_id])

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        answer = result.pop(ANSWER, None)
        if answer is not None and self.experiment.controller.is_among_the_best(answer.trial):
            result[SHOULD_CHECKPOINT] = True

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Remove the checkpoints of trials that are not among the best any more."""
        self._saved[self.experiment.numbers[trial.trial_id]] = trial
        for number in [one for one in self._saved if not self.experiment.controller.is_among_the_best(one)]:
            saved = self._saved.pop(number).checkpoint
            if saved is not None:
                shutil.rmtree(saved.path, ignore_errors=True)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self.experiment.end_the_late(trials)
        self.experiment.end_the_cut()
        self.experiment.look()


class Ends(Stopper):
    """The end of a search, for Tune."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        """Return True if the search is cut; Tune then stops all trials before the turn ends."""
        self.experiment.has_stopped = self.experiment.is_cut()
        return self.experiment.has_stopped


def _error_of(trial: Trial) -> BaseException | None:
    """Return the last error of a trial, from the file that Tune has written on this machine."""
    path = trial.pickled_error_file
    if path is None:
        return None
    with open(path, "rb") as file:  # noqa: PTH123 - Tune has a text there
        error: BaseException = cloudpickle.load(file)
    return error


def _unexpected(error: Exception) -> OrchestrayError:
    found = SearchError(f"The search cannot go on: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def _detached() -> None:
    """Return nothing instead of an experiment, which belongs to its process."""
