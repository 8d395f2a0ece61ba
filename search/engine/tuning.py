"""Ray Tune as the engine of a search: its controller runs the trials, ours says which.

`tune.Tuner` would read and write a folder a trial, start and end actors between trials and look for work once a
second; its controller, told what to keep, does none of it. This file alone steps below Tune's public API.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import ray
from ray._private.state import actors
from ray.train._internal.storage import StorageContext
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.registry import register_trainable
from ray.tune.schedulers import TrialScheduler
from ray.tune.search.search_algorithm import SearchAlgorithm
from ray.tune.utils.object_cache import _ObjectCache

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.gang.causes import cause_of
from orchestray.search.engine import quiet
from orchestray.search.engine.crowd import Crowd, cores_of
from orchestray.search.engine.director import SearchError
from orchestray.search.engine.resources import StartingResources

if TYPE_CHECKING:
    from orchestray.search.engine.conductor import Conductor
    from orchestray.search.engine.orders import Order, Rules, Told
    from orchestray.search.engine.processes import Processes

_NAME = "orchestray_trial"
_LOSSES = 2
"""A trial whose process dies so often between two of its reports, while it has the trial, has failed."""
_GRACE_S = 10.0
"""How long after its time limit a trial may take to notice it."""
_HALT_S = 5.0
_LOOK_S = 0.1
"""Between two looks at whether a process is to be waited for any longer."""
_REGISTRY = threading.Lock()
"""Tune's registry is one for the process, and not made for two threads."""


class _Trials(SearchAlgorithm):
    """Gives Tune a trial for each process that is free."""

    def __init__(
        self,
        conductor: Conductor,
        rules: Rules,
        bundles: list[dict[str, float]],
        crowd: Crowd,
        first: Sequence[Order],
    ) -> None:
        self.conductor, self.crowd = conductor, crowd
        self._first = deque(first)
        """Orders that the conductor has given already."""
        self.storage: StorageContext | None = None
        self.failure: OrchestrayError | None = None
        self.is_closed = False
        """No further trials are wanted."""
        self.begun: dict[str, Order] = {}
        """The order each process under way has begun with, by Tune's name for the trial."""
        self.since_s: dict[str, float] = {}
        """When each that is there began with its last order."""
        self._rules, self._bundles = rules, bundles
        self._count = 0

    def next_trial(self) -> Trial | None:
        if self.is_finished() or not self.crowd.has_room():
            return None
        order = self._first.popleft() if self._first else self.attempt(self.conductor.begin)
        if order is None:
            if not self.begun and self.failure is None and not self.conductor.is_over:
                self.failure = SearchError("The method proposes no further trial and waits for none; it is stuck.")
            return None
        self._count += 1
        trial = Trial(
            _NAME,
            config={"order": order, "rules": self._rules},
            trial_id=f"{self._count:08d}",
            storage=self.storage,
            placement_group_factory=PlacementGroupFactory([dict(bundle) for bundle in self._bundles]),
            max_failures=0,
        )
        self.begun[trial.trial_id] = order
        self.crowd.began(trial.trial_id)
        return trial

    def left(self, trial_id: str) -> Order | None:
        """A process is free, or gone; returns the order it had begun with."""
        self.crowd.left(trial_id)
        return self.begun.pop(trial_id, None)

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """Call the conductor; what ends the search is kept for whoever runs it."""
        try:
            return call(*arguments)
        except OrchestrayError as error:
            self.failure = self.failure or error
            return None

    @property
    def is_exhausted(self) -> bool:
        """Whether all trials there will be are in a process."""
        return self.conductor.director.is_done and self.conductor.num_waiting == 0

    def is_finished(self) -> bool:
        return self.is_closed or self.failure is not None

    def set_finished(self) -> None:
        self.is_closed = True

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None: ...

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None: ...


class _Answers(TrialScheduler):
    """Takes the answers of the processes to the conductor, and its orders to them."""

    def __init__(self, trials: _Trials) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        self._trials = trials
        self._losses: Counter[int] = Counter()
        self.cause = ""
        """Why the last process died."""
        self.doomed: dict[str, str] = {}
        """Why a process was killed on purpose, by Tune's name for the trial."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        told: Told = result["told"]
        self._trials.crowd.answered()
        further = None if told.is_halted else self._trials.attempt(self._trials.conductor.heard, told)
        if further is None:
            self._trials.left(trial.trial_id)
            return TrialScheduler.STOP
        self._losses.pop(told.trial, None)
        self._trials.since_s[trial.trial_id] = time.monotonic()
        # Calls of one caller are carried out in order: this one before the `train` that Tune sends next.
        actor: Any = trial.temporary_state.ray_actor
        actor.order.remote(further)
        return TrialScheduler.CONTINUE

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        order = self._trials.left(trial.trial_id)
        if order is None:
            return
        conductor, number = self._trials.conductor, order.trial
        if trial.trial_id in self.doomed:
            self._trials.attempt(conductor.failed, number, self.doomed.pop(trial.trial_id))
            return
        if trial in tune_controller._resetting_trials:
            conductor.lost(number)  # an idle process that died unnoticed: the trial has never been in it
            return
        self._losses[number] += 1
        if self._losses[number] >= _LOSSES:
            text = f"The trial failed: its process died {_LOSSES} times, the last time because {self.cause}."
            self._trials.attempt(conductor.failed, number, text)
        else:
            conductor.lost(number)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        return None  # those that are pending start in their order

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None: ...

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None: ...

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None: ...

    def debug_string(self) -> str:
        return ""


class _KeepAll(_ObjectCache):
    """Keeps every idle process until the end: it is as good for the next trial as a new one, and there at once."""

    def cache_object(self, key: Any, obj: Any) -> bool:
        self._cached_objects[key].append(obj)
        self._num_cached_objects += 1
        return True

    def flush_cached_objects(self, force_all: bool = False) -> Any:
        return super().flush_cached_objects(force_all=True) if force_all else iter(())


class _Classes:
    """Actors without an environment of their own: Ray has processes for those at hand."""

    def __init__(self, actor_class: Any) -> None:
        self._class = actor_class

    def get(self, trainable_class: type) -> Any:
        return self._class


class _Controller(TuneController):
    """Tune's controller, which leaves nothing on disk, and lets a process start in peace."""

    def checkpoint(self, *_: Any, **__: Any) -> None:
        """The journal has it all."""

    def _update_trial_queue(self, blocking: bool = False, timeout: int = 600) -> bool:
        # Where nothing is under way Tune's own asks again and again in here, for ten minutes. The method may have found
        # in being asked that it has no more to propose; and whoever runs the search looks for its end, and for whether
        # it was stopped or its time is up, between two turns.
        is_added: bool = super()._update_trial_queue(blocking=False)
        return is_added

    def _maybe_reuse_cached_actor(self, trial: Trial) -> bool:
        # Taking an idle process would end the one that is being started for this trial, to start another for the next.
        # One that waits for a place is not being started, and might wait for what the idle one holds.
        trials: Any = self._search_alg
        actor = self._trial_to_actor.get(trial)
        if actor is not None and self._actor_manager.is_actor_started(actor) and not trials.is_exhausted:
            return False
        reused: bool = super()._maybe_reuse_cached_actor(trial)
        return reused

    def _schedule_trial_reset(self, trial: Trial, new_config: Any, new_experiment_tag: str) -> None:
        # Tune's own sends along what a process would have to import Tune for.
        controller = cast("Any", self)
        controller._resetting_trials.add(trial)
        controller._schedule_trial_task(
            trial=trial,
            method_name="reset",
            args=(new_config["order"],),
            on_result=self._on_trial_reset,
            on_error=self._trial_task_failure,
        )

    def _trial_task_failure(self, trial: Trial, exception: Exception) -> None:
        answers: Any = self._scheduler_alg
        answers.cause = cause_of(exception)
        super()._trial_task_failure(trial, exception)


class Stage:
    """The processes of a search; a context manager that ends them."""

    def __init__(
        self,
        conductor: Conductor,
        rules: Rules,
        processes: Processes,
        *,
        parallel: int,
        bundles: list[dict[str, float]],
        total: dict[str, float] | None = None,
        first: Sequence[Order] = (),
    ) -> None:
        """
        Args:
            conductor: says what they do.
            rules: of the search.
            processes: where they come from.
            parallel: processes at once.
            bundles: what a trial is given: its own process, and further ones for those it starts.
            total: what there is in all, for trials of one process; None: each trial has a placement group.
            first: orders that the conductor has given already, to be carried out first.
        """
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet.TUNE)
        self._folder = tempfile.mkdtemp(prefix="orchestray-search-")
        self._trials = _Trials(conductor, rules, bundles, Crowd(parallel, cores_of(total)), first)
        self._answers = _Answers(self._trials)
        self._conductor, self._rules = conductor, rules
        storage = StorageContext(storage_path=self._folder, experiment_dir_name="trials")
        with _REGISTRY:
            register_trainable(_NAME, Trainable, warn=False)  # there must be one; its place is taken by `processes`
        controller = _Controller(
            search_alg=self._trials,
            scheduler=self._answers,
            storage=storage,
            reuse_actors=True,
            resource_manager_factory=lambda: StartingResources(processes, total),
        )
        self._controller = cast("Any", controller)
        self._staging = storage.experiment_driver_staging_path
        self._trials.storage = storage
        self._controller._class_cache = _Classes(processes.actor_class)
        self._controller._actor_cache = _KeepAll()
        self._controller._max_pending_trials = parallel
        self._controller._print_trial_errors = False

    def step(self) -> bool:
        """Wait for something to happen, 0.1 s at most; returns whether anything is left to do.

        Raises:
            OrchestrayError: the search cannot go on.
        """
        if self._trials.failure is not None:
            raise self._trials.failure
        if self._conductor.is_over:
            return False
        self._controller.step()
        self._end_the_late()
        return True

    def _end_the_late(self) -> None:
        """Kill processes whose trial is far beyond its time limit: what it does cannot be stopped otherwise."""
        limit_s = self._rules.time_limit_s
        if limit_s is None:
            return
        now_s = time.monotonic()
        for trial in list(self._controller._running_trials):
            since_s = self._trials.since_s.setdefault(trial.trial_id, now_s)
            actor = trial.temporary_state.ray_actor
            if (
                now_s - since_s > limit_s + _GRACE_S
                and actor is not None
                and trial.trial_id not in self._answers.doomed
            ):
                self._answers.doomed[trial.trial_id] = f"The trial ran out of its time limit of {limit_s:g} s."
                ray.kill(actor)

    def halt(self) -> None:
        """Have the trials under way write their states, and wait a while for it."""
        self._trials.is_closed = True
        told: set[str] = set()
        deadline_s = time.monotonic() + _HALT_S
        while self._controller._running_trials and time.monotonic() < deadline_s:
            for trial in self._controller._running_trials:  # one whose process was starting may join them yet
                actor = trial.temporary_state.ray_actor
                if actor is not None and trial.trial_id not in told:
                    told.add(trial.trial_id)
                    actor.halt.remote()
            self._controller.step()

    @property
    def is_under_way(self) -> bool:
        """Whether a trial is in a process."""
        return bool(self._controller._running_trials)

    def has_place(self) -> bool:
        """Whether Ray has given any of its processes a place, be it that it is still starting."""
        given = self._controller._actor_manager._live_actors_to_ray_actors_resources.values()
        # Before that it is asked for (Tune waits for a placement group), or has no process yet.
        return any(actors(actor._actor_id.hex()).get("Pid") for actor, _ in given)

    def leave_run(self, order: Order, directory: Path, is_given_up: Callable[[], bool]) -> Told | None:
        """Have an idle process write a trial's run.

        Args:
            order: of the trial.
            directory: of the run.
            is_given_up: asked now and then while the process is at it, which is ended where the answer is yes.

        Returns:
            Its answer; None if there is no idle process, or it was given up.
        """
        cache = self._controller._actor_cache._cached_objects
        idle = [tracked for tracked_actors in cache.values() for tracked in tracked_actors]
        alive = self._controller._actor_manager._live_actors_to_ray_actors_resources
        for tracked in idle:
            if tracked in alive:
                process = alive[tracked][0]
                answer = process.leave_run.remote(order, str(directory))
                while not ray.wait([answer], timeout=_LOOK_S)[0]:
                    if is_given_up():
                        ray.kill(process)
                        return None
                with contextlib.suppress(ray.exceptions.RayError):
                    return cast("Told", ray.get(answer))
        return None

    def close(self) -> None:
        """End every process, and remove what Tune has left."""
        try:
            self._controller._actor_manager.cleanup()
        finally:
            self._quiet.close()
            for folder in (self._folder, str(Path(self._staging).parent)):
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
