"""Ray Tune as the engine of a search: its controller runs the trials, ours decides which.

`tune.Tuner` would read and write a folder per trial, start and end actors between trials, and look for work once a
second. Its controller, with the settings below, does none of this. Only this module uses Tune below its public API.
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

from orchestray.platform.actors.death_cause import cause_of
from orchestray.platform.errors import OrchestrayError
from orchestray.search.engine import silence_loggers
from orchestray.search.engine.resources import StartingResources
from orchestray.search.engine.session import SearchError
from orchestray.search.engine.start_throttle import StartThrottle, cores_of

if TYPE_CHECKING:
    from orchestray.search.engine.controller import SearchController
    from orchestray.search.engine.messages import TrialLimits, TrialResult, TrialTask
    from orchestray.search.engine.processes import Processes

_NAME = "orchestray_trial"
_LOSSES = 2
"""Number of deaths of its process, between two reports, after which a trial has failed."""
_GRACE_S = 10.0
"""Seconds after its time limit within which a trial must notice it."""
_HALT_S = 5.0
_LOOK_S = 0.1
"""Seconds between two checks if a process should be given up."""
_REGISTRY = threading.Lock()
"""Lock for Tune's registry, which all threads of the process share and which is not thread-safe."""


class _Trials(SearchAlgorithm):
    """A search algorithm that gives Tune a trial for each free process."""

    def __init__(
        self,
        search_controller: SearchController,
        rules: TrialLimits,
        bundles: list[dict[str, float]],
        throttle: StartThrottle,
        first: Sequence[TrialTask],
    ) -> None:
        self.search_controller, self.throttle = search_controller, throttle
        self._first = deque(first)
        """Tasks that the search controller has given already."""
        self.storage: StorageContext | None = None
        self.failure: OrchestrayError | None = None
        self.is_closed = False
        """True if further trials are not wanted."""
        self.begun: dict[str, TrialTask] = {}
        """First task of each running process, by Tune's id of the trial."""
        self.since_s: dict[str, float] = {}
        """Time at which each running process began its last task."""
        self._rules, self._bundles = rules, bundles
        self._count = 0

    def next_trial(self) -> Trial | None:
        if self.is_finished() or not self.throttle.has_room():
            return None
        order = self._first.popleft() if self._first else self.attempt(self.search_controller.begin)
        if order is None:
            if not self.begun and self.failure is None and not self.search_controller.is_over:
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
        self.throttle.began(trial.trial_id)
        return trial

    def left(self, trial_id: str) -> TrialTask | None:
        """Record that a process is free or gone; return its first task."""
        self.throttle.left(trial_id)
        return self.begun.pop(trial_id, None)

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """Call the search controller; keep an error that ends the search for `TrialPool.step` to raise."""
        try:
            return call(*arguments)
        except OrchestrayError as error:
            self.failure = self.failure or error
            return None

    @property
    def is_exhausted(self) -> bool:
        """True if every remaining trial is in a process."""
        return self.search_controller.session.is_done and self.search_controller.num_waiting == 0

    def is_finished(self) -> bool:
        return self.is_closed or self.failure is not None

    def set_finished(self) -> None:
        self.is_closed = True

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None: ...

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None: ...


class _Answers(TrialScheduler):
    """A scheduler that passes the processes' results to the search controller, and its tasks back to them."""

    def __init__(self, trials: _Trials) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of Ray
        self._trials = trials
        self._losses: Counter[int] = Counter()
        self.cause = ""
        """Reason why the last process died."""
        self.doomed: dict[str, str] = {}
        """Reasons why processes were killed on purpose, by Tune's id of the trial."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        answer: TrialResult = result["told"]
        self._trials.throttle.answered()
        further = None if answer.is_halted else self._trials.attempt(self._trials.search_controller.receive, answer)
        if further is None:
            self._trials.left(trial.trial_id)
            return TrialScheduler.STOP
        self._losses.pop(answer.trial, None)
        self._trials.since_s[trial.trial_id] = time.monotonic()
        # An actor executes the calls of one caller in order: this one before the `train` that Tune sends next.
        actor: Any = trial.temporary_state.ray_actor
        actor.order.remote(further)
        return TrialScheduler.CONTINUE

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        order = self._trials.left(trial.trial_id)
        if order is None:
            return
        search_controller, number = self._trials.search_controller, order.trial
        if trial.trial_id in self.doomed:
            self._trials.attempt(search_controller.failed, number, self.doomed.pop(trial.trial_id))
            return
        if trial in tune_controller._resetting_trials:
            search_controller.lost(number)  # an idle process that died unnoticed: the trial was never in it
            return
        self._losses[number] += 1
        if self._losses[number] >= _LOSSES:
            text = f"The trial failed: its process died {_LOSSES} times, the last time because {self.cause}."
            self._trials.attempt(search_controller.failed, number, text)
        else:
            search_controller.lost(number)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        return None  # pending trials start in their order

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None: ...

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None: ...

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None: ...

    def debug_string(self) -> str:
        return ""


class _KeepAll(_ObjectCache):
    """A cache that keeps every idle process until the end, ready for the next trial."""

    def cache_object(self, key: Any, obj: Any) -> bool:
        self._cached_objects[key].append(obj)
        self._num_cached_objects += 1
        return True

    def flush_cached_objects(self, force_all: bool = False) -> Any:
        return super().flush_cached_objects(force_all=True) if force_all else iter(())


class _Classes:
    """A class cache of actors without a runtime environment of their own, for which Ray has processes ready."""

    def __init__(self, actor_class: Any) -> None:
        self._class = actor_class

    def get(self, trainable_class: type) -> Any:
        return self._class


class _Controller(TuneController):
    """Tune's controller, which here writes nothing to disk and does not interrupt starting processes."""

    def checkpoint(self, *_: Any, **__: Any) -> None:
        """Do nothing: the journal has everything."""

    def _update_trial_queue(self, blocking: bool = False, timeout: int = 600) -> bool:
        # While no trial is running, Tune's own version keeps asking here for ten minutes. Meanwhile the method may find
        # that it has nothing more to propose. The caller also checks between two steps for the search's end, a stop or
        # its time limit.
        is_added: bool = super()._update_trial_queue(blocking=False)
        return is_added

    def _maybe_reuse_cached_actor(self, trial: Trial) -> bool:
        # Reusing an idle process would end the one being started for this trial, and start another for the next. One
        # that waits for resources has not started yet, and may wait for those of the idle one.
        trials: Any = self._search_alg
        actor = self._trial_to_actor.get(trial)
        if actor is not None and self._actor_manager.is_actor_started(actor) and not trials.is_exhausted:
            return False
        reused: bool = super()._maybe_reuse_cached_actor(trial)
        return reused

    def _schedule_trial_reset(self, trial: Trial, new_config: Any, new_experiment_tag: str) -> None:
        # Tune's own version passes objects for which a process would have to import Tune.
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


class TrialPool:
    """The processes of a search, as a context manager that ends them."""

    def __init__(
        self,
        search_controller: SearchController,
        rules: TrialLimits,
        processes: Processes,
        *,
        parallel: int,
        bundles: list[dict[str, float]],
        total: dict[str, float] | None = None,
        first: Sequence[TrialTask] = (),
    ) -> None:
        """
        Args:
            search_controller: decides what they do.
            rules: limits of the search.
            processes: starter of the processes.
            parallel: number of concurrent processes.
            bundles: resources of a trial: for its own process, and for those it starts.
            total: all resources, for trials of one process; None: each trial has a placement group.
            first: tasks that the search controller has given already, to be carried out first.
        """
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(silence_loggers.TUNE)
        self._folder = tempfile.mkdtemp(prefix="orchestray-search-")
        self._trials = _Trials(search_controller, rules, bundles, StartThrottle(parallel, cores_of(total)), first)
        self._answers = _Answers(self._trials)
        self._search_controller, self._rules = search_controller, rules
        storage = StorageContext(storage_path=self._folder, experiment_dir_name="trials")
        with _REGISTRY:
            register_trainable(_NAME, Trainable, warn=False)  # required, but `processes` replaces it
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
        """Wait up to 0.1 s for an event; return True if anything is left to do.

        Raises:
            OrchestrayError: the search cannot continue.
        """
        if self._trials.failure is not None:
            raise self._trials.failure
        if self._search_controller.is_over:
            return False
        self._controller.step()
        self._end_the_late()
        return True

    def _end_the_late(self) -> None:
        """Kill processes whose trial is far beyond its time limit, since it cannot be stopped in another way."""
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
        """Have the running trials write their states, and wait a while for it."""
        self._trials.is_closed = True
        halted: set[str] = set()
        deadline_s = time.monotonic() + _HALT_S
        while self._controller._running_trials and time.monotonic() < deadline_s:
            for trial in self._controller._running_trials:  # a starting process may still join them
                actor = trial.temporary_state.ray_actor
                if actor is not None and trial.trial_id not in halted:
                    halted.add(trial.trial_id)
                    actor.halt.remote()
            self._controller.step()

    @property
    def is_under_way(self) -> bool:
        """True if a trial is in a process."""
        return bool(self._controller._running_trials)

    def has_place(self) -> bool:
        """Return True if any process has its resources from Ray, even if it is still starting."""
        given = self._controller._actor_manager._live_actors_to_ray_actors_resources.values()
        # Before that, it is only requested (Tune waits for a placement group), or has no process yet.
        return any(actors(actor._actor_id.hex()).get("Pid") for actor, _ in given)

    def leave_run(self, order: TrialTask, directory: Path, is_given_up: Callable[[], bool]) -> TrialResult | None:
        """Have an idle process write a trial's run.

        Args:
            order: task with the trial.
            directory: directory of the run.
            is_given_up: called regularly; the process is killed once it returns True.

        Returns:
            Its result; None without an idle process, or if it was given up.
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
                    return cast("TrialResult", ray.get(answer))
        return None

    def close(self) -> None:
        """End every process, and remove the files that Tune has left."""
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
