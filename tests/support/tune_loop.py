"""Tune's controller with a searcher and a scheduler, in its order, without Ray: trials are only counted.

The order is that of Ray's TuneController (2.60): ask, have the scheduler choose, one event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.tune import Checkpoint
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import SearchGenerator
from ray.tune.search.searcher import Searcher

from orchestray.platform.cluster import ray_internals
from orchestray.search.methods.base import Pause, Proposal
from orchestray.search.tune.scheduler import MethodScheduler, tune_scheduler
from orchestray.search.tune.searcher import MethodSearcher
from support.method_cases import smooth

_MOST_EVENTS = 20_000
"""Far more than any search here has: who comes to it would go on for ever."""


@dataclass(frozen=True)
class State:
    """Progress of a trainable."""

    step: int = 0
    at: tuple[int, int] | None = None
    """(trial, report) that it was saved with; None: the beginning."""


@dataclass(frozen=True)
class Saved:
    """Tune's result of a save: what a scheduler reads of it."""

    checkpoint: Checkpoint | None


class TuneLoop:
    """A Tuner whose trainable scores by its config and its steps."""

    def __init__(
        self,
        searcher: MethodSearcher,
        *,
        is_scheduled: bool = True,
        saves: bool = True,
        running: int = 3,
        most_live: int | None = None,
        most: float = math.inf,
        fails: tuple[int, int] | None = None,
        stride: int = 1,
    ) -> None:
        """
        Args:
            searcher: a new one.
            is_scheduled: with its scheduler; else every trial is trained to its end.
            saves: whether the trainable has checkpoints.
            running: trials at once.
            most_live: `max_concurrent_trials`; None: not given.
            most: `num_samples`.
            fails: (trial, step) that raises.
            stride: steps between two results of a trial.
        """
        self.searcher = searcher
        self.scheduler: MethodScheduler | None = tune_scheduler(searcher) if is_scheduled else None
        self.saves, self.num_running, self.fails = saves, running, fails
        self.most_live, self.most, self.stride = most_live, most, stride
        self.trials: list[Trial] = []
        self.configs: list[dict[str, Any]] = []
        """Config of each trial as it was proposed."""
        self.begun_from: dict[int, list[State]] = {}
        """States of each trial at every time it was given a process."""
        self._states: dict[str, State] = {}
        self._files: dict[str, State] = {}
        self.num_events = 0
        self.search_alg = SearchGenerator(searcher)  # only its count and whether it goes on asking
        self._count(is_finished=False)
        self._saving: Trial | None = None
        self._rng = np.random.default_rng(3)

    def run(self, events: int | None = None) -> TuneLoop:
        """Process `events` events, or all to the end."""
        for _ in range(_MOST_EVENTS if events is None else events):
            if self.is_over:
                return self
            self._event()
        assert events is not None, "the search goes on for ever"
        return self

    @property
    def is_over(self) -> bool:
        return self.search_alg.is_finished() and not self._of(Trial.PENDING, Trial.RUNNING, Trial.PAUSED)

    def restore(self, searcher: MethodSearcher, *, begins_all: bool = False) -> TuneLoop:
        """Go on with another searcher and a new scheduler, as `Tuner.restore` does.

        Args:
            searcher: that was restored.
            begins_all: every trial that has not ended goes on from its last checkpoint, as Tune has it; else from where
                it was, so that nothing differs from a search that went through.
        """
        self.searcher, self.scheduler = searcher, tune_scheduler(searcher)
        for trial in self.trials:
            if begins_all and trial.status in (Trial.RUNNING, Trial.PAUSED):
                trial.set_status(Trial.PENDING)
            self.scheduler.on_trial_add(self, trial)
        return self

    def state_at(self, path: str) -> State:
        """Return the state of the checkpoint there."""
        return self._files[path]

    # -- what a scheduler asks of the controller -----------------------------------------------------------------------

    def _schedule_trial_save(self, trial: Trial, result: dict[str, Any] | None = None) -> Saved:
        number, path = self.searcher.numbers[trial.trial_id], f"/states/{len(self._files)}"
        self._saving = trial
        if not self.saves:
            return Saved(None)
        standing = self.searcher.session.trials[number]
        self._files[path] = State(self._states[trial.trial_id].step, (number, standing.num_reports))
        saved = Saved(Checkpoint(path))
        ray_internals.restore_from(trial, saved)  # what a trial has saved last it goes on from
        return saved

    def pause_trial(self, trial: Trial, should_checkpoint: bool = True) -> None:
        assert trial is not self._saving, "Tune would end the trial at its next save"
        if should_checkpoint:
            self._schedule_trial_save(trial)
        trial.set_status(Trial.PAUSED)

    def stop_trial(self, trial: Trial) -> None:
        if trial.status == Trial.RUNNING:
            if self.scheduler is not None:
                self.scheduler.on_trial_complete(self, trial, trial.last_result)
            self.searcher.on_trial_complete(trial.trial_id, trial.last_result)
        else:
            if self.scheduler is not None:
                self.scheduler.on_trial_remove(self, trial)
            self.searcher.on_trial_complete(trial.trial_id)
        trial.set_status(Trial.TERMINATED)

    def get_trials(self) -> list[Trial]:
        return self.trials

    # -- the controller ------------------------------------------------------------------------------------------------

    def _of(self, *statuses: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.status in statuses]

    def _event(self) -> None:
        self.num_events += 1
        self._ask()
        chosen = None if self.scheduler is None else self.scheduler.choose_trial_to_run(self)
        for trial in [*([] if chosen is None else [chosen]), *self._of(Trial.PENDING)]:
            if trial.status != Trial.RUNNING and len(self._of(Trial.RUNNING)) < self.num_running:
                self._begin(trial)
        if running := self._of(Trial.RUNNING):
            self._train(running[int(self._rng.integers(len(running)))])

    def _count(self, *, is_finished: bool) -> None:
        """Count the trials as Tune does, which asks for as many as `most` only."""
        state = {"counter": len(self.trials), "total_samples": self.most, "finished": is_finished, "experiment": None}
        self.search_alg.set_state(state)

    def _ask(self) -> None:
        live = self._of(Trial.PENDING, Trial.RUNNING, Trial.PAUSED)
        is_full = self.most_live is not None and len(live) >= self.most_live
        if self.search_alg.is_finished() or is_full or self._of(Trial.PENDING):
            return
        trial_id = f"trial-{self.num_events}"
        config = self.searcher.suggest(trial_id)
        if config == Searcher.FINISHED:
            self._count(is_finished=True)
        elif config is not None:
            trial = Trial("own", config=dict(config), trial_id=trial_id, stub=True)
            self.trials.append(trial)
            self.configs.append(dict(config))
            self._count(is_finished=False)
            if self.scheduler is not None:
                self.scheduler.on_trial_add(self, trial)

    def _begin(self, trial: Trial) -> None:
        number = self.searcher.numbers[trial.trial_id]
        state = State() if trial.checkpoint is None else self._files[trial.checkpoint.path]
        self._states[trial.trial_id] = state
        self.begun_from.setdefault(number, []).append(state)
        trial.set_status(Trial.RUNNING)

    def _train(self, trial: Trial) -> None:
        number, state = self.searcher.numbers[trial.trial_id], self._states[trial.trial_id]
        step = state.step + self.stride
        if (number, step) == self.fails:
            if self.scheduler is not None:
                self.scheduler.on_trial_error(self, trial)
            self.searcher.on_trial_complete(trial.trial_id, error=True)
            trial.set_status(Trial.ERROR)
            return
        self._states[trial.trial_id] = State(step, state.at)
        changes = {key: value for key, value in trial.config.items() if key not in ("genome", "inherits")}
        score = smooth(Proposal(number, changes, trial.config.get("genome")), step)
        result = {"score": score, "training_iteration": step}
        is_over = self.scheduler is None and step >= self.searcher.session.budget(number)
        decision = TrialScheduler.STOP if is_over else self._decide(trial, result)
        if decision != TrialScheduler.STOP:
            self.searcher.on_trial_result(trial.trial_id, result)
        trial.update_last_result(result)
        if decision == TrialScheduler.STOP:
            self.stop_trial(trial)
        elif decision == TrialScheduler.PAUSE:
            self.pause_trial(trial)

    def _decide(self, trial: Trial, result: dict[str, Any]) -> str:
        if self.scheduler is None:
            return TrialScheduler.CONTINUE
        standing = self.searcher.session.trials[self.searcher.numbers[trial.trial_id]]
        is_held = isinstance(standing.decision, Pause) and result["training_iteration"] >= standing.step
        decision = self.scheduler.on_trial_result(self, trial, result)
        assert not is_held or decision == TrialScheduler.PAUSE, "who is held trains on"
        self._saving = None
        return decision
