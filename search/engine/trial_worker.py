"""The process of a trial without Ray: it builds programs, moves states, enforces limits and reports errors."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.member import give_back_freed_memory
from orchestray.platform.errors import NodeLeavesError, OrchestrayError, PlaceLostError, StorageError, TrainingError
from orchestray.platform.usercode.beside import use_texts
from orchestray.search.checkpoints.state_files import KEPT, StateAt, StateFiles, StateLostError
from orchestray.search.engine.memory_limit import limited_memory
from orchestray.search.engine.messages import GANG, ORDINARY, TrialLimits, TrialResult, TrialTask
from orchestray.search.engine.program_protocols import (
    Changeable,
    Closable,
    InheritsWeights,
    KnowsMetrics,
    MayLackValidation,
    Measured,
    MeasuredUntrained,
    PausesSlowly,
    Stoppable,
)
from orchestray.search.registry.programs import find_program
from orchestray.search.trials.program import taken_over
from orchestray.search.trials.task_cache import TaskCache

if TYPE_CHECKING:
    from orchestray.search.trials.gang import WorkerPool
    from orchestray.search.trials.program import Progress, TrialProgram, TrialState
    from orchestray.trainers.config.schema import TrainConfig


_PAUSED_SHARE = 0.05
"""Maximum fraction of a trial's time for pauses in which its state is copied for its file."""
_MOST_BETWEEN_SAVES_S = 600.0
"""Maximum seconds between saves, however long a pause is: later progress is lost with the process."""


class TrialHost:
    """A host that carries out one task after the other; it keeps data and tasks between trials."""

    def __init__(
        self, rules: TrialLimits, *, address: str = "127.0.0.1", is_leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            rules: limits of the search.
            address: address at which other machines reach this one.
            is_leaving: returns True once this machine is announced to leave the cluster.
        """
        self._rules, self._address, self._is_leaving = rules, address, is_leaving
        self._task_cache = TaskCache()
        self._files = StateFiles(rules.directory)
        self._saver = ThreadPoolExecutor(1, "states")
        """Thread that writes states on the way to a report."""
        self._saving: Future[None] | None = None
        self._program: TrialProgram | None = None
        self._made_by = ""
        """Name of the program, as tasks give it."""
        self._trial = -1
        self._config: TrainConfig | None = None
        self._used_s = self._reported_s = 0.0
        """Seconds of work on the trial in all processes, and the part that the driver knows of."""
        self._since_s = 0.0
        """Monotonic time from which its work is not counted yet."""
        self._saved_s = 0.0
        """Monotonic time at which the trial's state was last saved."""
        self._evaluations: list[Mapping[str, float]] = []
        """Validations of the trial since its last report."""
        self._copied_bytes = 0
        """Bytes of the state of another trial that it has taken over since its last report."""
        self._are_named = not rules.objectives.of_validation
        """True if the task is known to have the metrics of the objectives."""
        self._room: WorkerPool | None = None
        """Pool of the workers of trials that have several."""

    def work(self, order: TrialTask) -> TrialResult:
        """Carry out a task; errors of the trial are part of the result.

        Raises:
            PlaceLostError: the resources of this process are gone, or are about to go: the trial can only continue in
                another.
        """
        self._since_s = time.monotonic()
        with use_texts(self._rules.texts):
            return self._answered(order)

    def _answered(self, order: TrialTask) -> TrialResult:
        try:
            if self._is_new(order):
                self._make_room()
            with limited_memory(self._rules.memory_mb):
                result = self._work(order)
        except PlaceLostError:
            raise
        except StorageError as error:
            return replace(_failed(order, error, self._seconds()), is_unsaved=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code fails the trial, not the search
            shown = self._out_of_memory(error) if _is_out_of_memory(error) else error
            return _failed(order, shown, self._seconds())
        return result

    def stop(self) -> None:
        """Have a task in another thread end after the current step."""
        program: object = self._program
        if isinstance(program, Stoppable):
            program.request_stop()

    def checkpoint(self) -> tuple[TrainConfig, TrialState]:
        """Return the config of the trial, and a copy of its state."""
        assert self._program is not None
        assert self._config is not None
        return self._config, self._program.state()

    def leave_run(self, order: TrialTask, directory: str) -> TrialResult:
        """Build a trial in a given state, and write its run directory; errors are handled as in `work`."""
        began_s = time.monotonic()
        try:
            with use_texts(self._rules.texts):
                is_there = self._begin(order)
            assert self._program is not None
            if not is_there:  # its file is lost: train up to it again
                self._program.advance(order.until)
            self._program.leave_run(Path(directory))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in `work`
            return _failed(order, error, time.monotonic() - began_s)
        return TrialResult(order.trial, seconds=time.monotonic() - began_s)

    def close(self) -> None:
        """Release the trial and its workers; return when pending writes are finished."""
        with contextlib.ExitStack() as stack:  # each of them, even if another fails
            stack.callback(self._saver.shutdown)
            if self._room is not None:
                stack.callback(self._room.close)
            self._drop()

    def _work(self, order: TrialTask) -> TrialResult:
        if self._is_new(order):
            self._begin(order)
        elif order.config is not None or order.source is not None:
            self._change(order)
        assert self._program is not None
        if (problem := self._misnamed()) is not None:
            return TrialResult(order.trial, seconds=self._seconds(), error=problem, is_misnamed=True)
        progress = self._refused() or self._advance(order)
        seconds, copied_bytes = self._seconds(), self._copied_bytes
        measures = self._program.measures() if isinstance(self._program, Measured) else {}
        is_written = self._keep(order, {**measures, **progress.metrics})
        return TrialResult(
            order.trial,
            progress.step,
            progress.metrics,
            progress.evaluations,
            progress.told,
            is_over=progress.is_over,
            is_written=is_written,
            seconds=seconds,
            copied_bytes=copied_bytes,
            measures=measures,
        )

    def _refused(self) -> Progress | None:
        """Only validate a network whose size breaks a bound: training could not mend that. None: it may train."""
        program: object = self._program
        objectives = self._rules.objectives
        if not (objectives.bounds and isinstance(program, MeasuredUntrained) and program.step == 0):
            return None
        assert self._program is not None
        is_refused = objectives.are_broken_by(program.measures())
        return replace(self._program.advance(0), is_over=True) if is_refused else None

    def _advance(self, order: TrialTask) -> Progress:
        """Train up to the next report, saving the state from time to time.

        Raises:
            TrainingError: the trial's time is up.
        """
        assert self._program is not None
        limit_s = self._rules.time_limit_s
        while True:
            with self._stopped_after(self._pause_s()):
                progress = self._program.advance(order.until)
            self._count()
            self._evaluations += progress.evaluations
            if limit_s is not None and self._used_s > limit_s:
                raise TrainingError(f"The trial ran out of its time limit of {limit_s:g} s at step {progress.step}.")
            if not progress.is_interrupted:
                return replace(progress, evaluations=tuple(self._evaluations))
            if self._is_leaving():
                self._leave(order)
            self._save_on_the_way(order.trial, order.report)

    def _leave(self, order: TrialTask) -> None:
        """Write the state, and give up this process.

        Raises:
            NodeLeavesError: always, once the state is written.
        """
        at, state = StateAt(order.trial, order.report, is_on_the_way=True), self._state(order.report)
        self._saver.submit(self._files.write, at, state, is_secure=True).result()  # after a write that is under way
        raise NodeLeavesError("The machine of the trial leaves the cluster; the trial goes on on another.")

    def _pause_s(self) -> float | None:
        """Return the seconds until the program must pause, for its time limit or for saving; None: never."""
        self._count()
        limit_s, every_s = self._rules.time_limit_s, self._save_every_s()
        left = [] if limit_s is None else [limit_s - self._used_s]
        if every_s > 0:
            left.append(self._saved_s + every_s - time.monotonic())
        return max(0.0, min(left)) if left else None

    def _save_every_s(self) -> float:
        """Return the seconds between two pauses for saving the state; 0: no pauses."""
        every_s = self._rules.save_every_s
        program: object = self._program
        if every_s > 0 and isinstance(program, PausesSlowly):
            return max(every_s, min(program.pause_cost_s / _PAUSED_SHARE, _MOST_BETWEEN_SAVES_S))
        return every_s

    def _count(self) -> None:
        now_s = time.monotonic()
        self._used_s += now_s - self._since_s
        self._since_s = now_s

    def _seconds(self) -> float:
        """Return the seconds of work that the driver does not know of yet."""
        self._count()
        seconds, self._reported_s = self._used_s - self._reported_s, self._used_s
        return seconds

    def _misnamed(self) -> str | None:
        """Return an error on objectives that no trial can report, found before this process trains its first trial."""
        if self._are_named:
            return None
        self._are_named = True
        program: object = self._program
        objectives = self._rules.objectives
        if isinstance(program, MayLackValidation) and objectives.of_validation and not program.has_validation():
            return (
                f"search.objective.metric: {objectives.of_validation[0]!r} is known by validation, and the task has no "
                "validation data; have its dataset('validation') return some, or choose train_loss"
            )
        if not objectives.of_task:
            return None
        known = program.metric_names(objectives.of_task) if isinstance(program, KnowsMetrics) else None
        return None if known is None else objectives.misnamed(known)

    def _begin(self, order: TrialTask) -> bool:
        """Build the trial; return True if it has the state that it should begin with."""
        assert order.config is not None
        self._drop()
        self._trial = order.trial
        self._used_s = self._reported_s = order.used_s
        self._saved_s, self._evaluations, self._copied_bytes = time.monotonic(), [], 0
        self._program = self._build(order, order.config)
        self._config = order.config
        return order.source is not None and self._take(order, order.source)

    def _is_new(self, order: TrialTask) -> bool:
        """Return True if the trial must be built."""
        return order.begins or order.trial != self._trial

    def _make_room(self) -> None:
        """Free the memory of the previous trial, which would count towards the next one's limit."""
        self._drop()
        if self._rules.memory_mb is not None:
            give_back_freed_memory()

    def _drop(self) -> None:
        """Release the program: its memory is not needed while the next is built."""
        program: object = self._program
        self._program = None
        if isinstance(program, Closable):
            program.close()

    def _change(self, order: TrialTask) -> None:
        """Switch to another trial's state, other hyper-parameters, or both."""
        assert self._program is not None
        config = order.config or self._config
        assert config is not None
        if order.config is not None and order.config != self._config:
            if isinstance(self._program, Changeable) and order.program == self._made_by:
                self._program.become(order.config)
            else:
                before = self._program.state()
                self._drop()
                self._program = self._build(order, order.config)
                self._program.load(before)
            self._config = order.config
        if order.source is not None:
            self._take(order, order.source)

    def _for_gangs(self) -> dict[str, Any]:
        from orchestray.search.trials.gang import WorkerPool

        self._room = self._room or WorkerPool(self._address)
        rules = self._rules
        return {"room": self._room, "directory": rules.directory, "cpus_per_worker": rules.cpus_per_worker}

    def _take(self, order: TrialTask, at: StateAt) -> bool:
        """Load a state; return True if it was found.

        If the state is lost, the trial starts from scratch, which gives the same result. It must not if the state may
        have been another trial's.
        """
        assert self._program is not None
        try:
            state = self._files.read(at)
        except StateLostError:
            if order.is_exact:
                raise
            return False
        state, kept = _apart(state)
        if at.trial == order.trial and kept:
            self._used_s = max(self._used_s, kept["used_s"])  # includes the work that the driver does not know of
            if kept["report"] == order.report:
                self._evaluations = list(kept["evaluations"])
                self._copied_bytes = kept.get("copied_bytes", 0)
        if order.partly and isinstance(self._program, InheritsWeights):
            self._program.inherit(state, overlap=order.overlaps)
        else:
            is_anothers = at.trial != order.trial and not order.partly
            self._program.load(taken_over(state) if is_anothers else state, partly=order.partly)
            if is_anothers:
                self._copied_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        return True

    def _build(self, order: TrialTask, config: TrainConfig) -> TrialProgram:
        made = find_program(order.program)
        extra: dict[str, Any] = {}
        if order.program == ORDINARY:
            extra = {"task_cache": self._task_cache, "is_measured": self._rules.objectives.are_of_network}
        elif order.program == GANG:
            extra = {**self._for_gangs(), "is_measured": self._rules.objectives.are_of_network}
        program: TrialProgram = made(config, **order.arguments, **extra)
        self._made_by = order.program
        return program

    def _keep(self, order: TrialTask, metrics: dict[str, float]) -> bool:
        """Write the state of a report to its file if it is needed; return True if it was."""
        try:
            score: float | None = self._rules.objectives.scores(metrics)[0]
        except OrchestrayError:
            score = None  # the driver reports it
        is_needed = order.writes_state or (order.bar is not None and score is not None and score >= order.bar)
        if is_needed:
            self._files.write(StateAt(order.trial, order.report), self._state(order.report))
        self._evaluations, self._copied_bytes = [], 0
        if order.is_exact:
            self._saved_s = time.monotonic()
        elif order.writes_state and time.monotonic() - self._saved_s >= self._rules.save_every_s:
            self._save_on_the_way(order.trial, order.report + 1)  # this one survives a power failure
        return is_needed

    def _save_on_the_way(self, trial: int, report: int) -> None:
        """Write the state on the way to a report in the background, unless the last such write is unfinished."""
        if self._saving is None or self._saving.done():
            at = StateAt(trial, report, is_on_the_way=True)
            self._saving = self._saver.submit(self._files.write, at, self._state(report), is_secure=True)
        self._saved_s = time.monotonic()

    def _state(self, report: int) -> TrialState:
        """Return a copy of the state, with the progress that a report must include."""
        assert self._program is not None
        state, evaluations = self._program.state(), [dict(one) for one in self._evaluations]
        kept = {"report": report, "evaluations": evaluations, "used_s": round(self._used_s, 6)}
        kept |= {"copied_bytes": self._copied_bytes} if self._copied_bytes else {}
        return replace(state, position={**state.position, KEPT: kept})

    @contextlib.contextmanager
    def _stopped_after(self, seconds: float | None) -> Iterator[None]:
        """Stop a stoppable program after the given seconds."""
        if seconds is None:
            yield
            return
        alarm = threading.Timer(seconds, self.stop)
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _out_of_memory(self, error: BaseException) -> TrainingError:
        self._drop()  # frees memory for what follows
        limit_mb = self._rules.memory_mb
        limit = f": its process may hold {limit_mb:g} MB" if limit_mb is not None else ""
        return TrainingError(f"The trial ran out of memory{limit}. {str(error).splitlines()[0] if str(error) else ''}")


def _apart(state: TrialState) -> tuple[TrialState, dict[str, Any]]:
    """Return a state as its program made it, and the values stored with it."""
    position = dict(state.position)
    kept = position.pop(KEPT, {})
    return replace(state, position=position), kept


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True for out-of-memory errors of Python or torch (which raises a RuntimeError, possibly wrapped)."""
    return isinstance(error, MemoryError) or "Cannot allocate memory" in str(error) or "out of memory" in str(error)


def _failed(order: TrialTask, error: BaseException, seconds: float) -> TrialResult:
    text = str(error) if isinstance(error, OrchestrayError) else f"{type(error).__name__}: {error}"
    shown = "".join(traceback.format_exception(error))
    return TrialResult(order.trial, seconds=seconds, error=text, traceback=shown)
