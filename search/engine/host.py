"""The process of a trial without Ray: builds programs, moves states, keeps limits; what goes wrong is an answer."""

from __future__ import annotations

import contextlib
import importlib
import resource
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError, StorageError, TrainingError
from orchestray.platform.gang.member import give_back_freed_memory
from orchestray.search.engine.abilities import Changeable, Closable, Foreseeing, Heir, Measured, Stoppable
from orchestray.search.engine.orders import GANG, ORDINARY, Order, Rules, Told
from orchestray.search.engine.state_files import StateFiles, StateLostError
from orchestray.search.engine.vault import Vault
from orchestray.search.trials.shelf import Shelf

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.engine.gang_trial import Room
    from orchestray.search.engine.state_files import StatePlace
    from orchestray.search.trials.program import Progress, TrialProgram


class TrialHost:
    """Carries out one order after the other; keeps data, tasks and states between trials."""

    def __init__(self, rules: Rules, *, address: str = "127.0.0.1") -> None:
        """
        Args:
            rules: of the search.
            address: at which other machines reach this one.
        """
        self._rules = rules
        self._shelf = Shelf()
        self._vault = Vault(StateFiles(rules.directory), host=address)
        self._program: TrialProgram | None = None
        self._trial = -1
        self._config: TrainConfig | None = None
        self._used_s = 0.0
        self._saved_s = 0.0
        """When the trial's state was last sent to its file, by the monotonic clock."""
        self._halted = threading.Event()
        self._are_named = not rules.objectives.of_task
        """Whether the task is known to have the metrics that are looked for."""
        self._room: Room | None = None
        """Of the workers of trials that have several."""

    def work(self, order: Order) -> Told:
        """Carry out an order; never raises."""
        began_s = time.monotonic()
        try:
            if self._is_new(order):
                self._make_room()
            with _limited_memory(self._rules.memory_mb):
                told = self._work(order)
        except StorageError as error:
            return replace(_failed(order, error, began_s), is_unsaved=True)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises, the trial has failed, not the search
            return _failed(order, self._out_of_memory(error) if _is_out_of_memory(error) else error, began_s)
        return told

    def stop(self) -> None:
        """Have the order that is carried out in another thread end after the current step."""
        program: object = self._program
        if isinstance(program, Stoppable):
            program.request_stop()

    def halt(self) -> None:
        """As `stop`; the state is written to its file, and the answer says that it is no report."""
        self._halted.set()
        self.stop()

    def leave_run(self, order: Order, directory: str) -> Told:
        """Build a trial in a state, and have it leave a run directory; answers as `work`."""
        began_s = time.monotonic()
        try:
            self._begin(order)
            assert self._program is not None
            self._program.leave_run(Path(directory))
        except Exception as error:  # noqa: BLE001 - as in `work`
            return _failed(order, error, began_s)
        return Told(order.trial, seconds=time.monotonic() - began_s)

    def close(self) -> None:
        """Hand nothing out any more; what is being written is finished."""
        self._drop()
        if self._room is not None:
            self._room.close()
        self._vault.close()

    def _work(self, order: Order) -> Told:
        began_s = time.monotonic()
        if self._halted.is_set():
            return Told(order.trial, is_halted=True)
        if self._is_new(order):
            self._begin(order)
        elif order.config is not None or order.source is not None:
            self._change(order)
        if order.needed is not None:
            self._vault.retain({*order.needed, order.trial})
        assert self._program is not None
        if (problem := self._misnamed()) is not None:
            return Told(order.trial, seconds=time.monotonic() - began_s, error=problem, is_misnamed=True)
        with self._limited_time():
            if self._halted.is_set():  # in the meantime; what is built has not begun
                return Told(order.trial, is_halted=True)
            progress = self._program.advance(order.until)
        seconds = time.monotonic() - began_s
        if self._halted.is_set():
            self._vault.put(order.trial, order.report, self._program.state())
            self._vault.write_beside(order.trial)
            return Told(order.trial, progress.step, seconds=seconds, is_halted=True)
        self._used_s += seconds
        limit_s = self._rules.time_limit_s
        if limit_s is not None and self._used_s > limit_s:
            raise TrainingError(f"The trial ran out of its time limit of {limit_s:g} s at step {progress.step}.")
        measures = self._program.measures() if isinstance(self._program, Measured) else {}
        place, is_written = self._keep(order, progress, {**measures, **progress.metrics})
        return Told(
            order.trial,
            progress.step,
            progress.metrics,
            progress.evaluations,
            progress.told,
            is_over=progress.is_over,
            place=place,
            is_written=is_written,
            seconds=seconds,
            measures=measures,
        )

    def _misnamed(self) -> str | None:
        """What is wrong with the objectives' names, found before the first trial of this process is trained."""
        if self._are_named:
            return None
        self._are_named = True
        program: object = self._program
        objectives = self._rules.objectives
        known = program.metric_names(objectives.of_task) if isinstance(program, Foreseeing) else None
        return None if known is None else objectives.misnamed(known)

    def _begin(self, order: Order) -> None:
        assert order.config is not None
        self._drop()
        self._trial = order.trial
        self._used_s, self._saved_s = order.used_s, time.monotonic()
        self._program = self._build(order, order.config)
        self._config = order.config
        if order.source is not None:
            self._take(order, order.source)

    def _is_new(self, order: Order) -> bool:
        """Whether the trial has to be built."""
        return order.begins or order.trial != self._trial

    def _make_room(self) -> None:
        """Have the process hold nothing of the trial before, which would count towards the next one's limit."""
        self._drop()
        if self._rules.memory_mb is not None:
            give_back_freed_memory()

    def _drop(self) -> None:
        """Let go of the program: what it holds need not be held while the next is built."""
        program: object = self._program
        self._program = None
        if isinstance(program, Closable):
            program.close()

    def _change(self, order: Order) -> None:
        """Take another's state, other hyper-parameters, or both."""
        assert self._program is not None
        config = order.config or self._config
        assert config is not None
        if order.config is not None and order.config != self._config:
            if isinstance(self._program, Changeable):
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
        from orchestray.search.engine.gang_trial import Room

        self._room = self._room or Room()
        rules = self._rules
        return {"room": self._room, "directory": rules.directory, "cpus_per_worker": rules.cpus_per_worker}

    def _take(self, order: Order, place: StatePlace) -> None:
        """Take a state. Where that is lost for good a trial begins again, which comes to the same; not so where it may
        have been another's.
        """
        assert self._program is not None
        try:
            state = self._vault.fetch(place, exact=order.is_exact)
        except StateLostError:
            if order.is_exact:
                raise
            return
        if order.partly and isinstance(self._program, Heir):
            self._program.inherit(state, overlap=order.overlaps)
        else:
            self._program.load(state, partly=order.partly)

    def _build(self, order: Order, config: TrainConfig) -> TrialProgram:
        module, _, name = order.program.partition(":")
        made: Any = getattr(importlib.import_module(module), name)
        extra: dict[str, Any] = {}
        if order.program == ORDINARY:
            extra = {"shelf": self._shelf, "is_measured": self._rules.objectives.are_of_network}
        elif order.program == GANG:
            extra = {**self._for_gangs(), "is_measured": self._rules.objectives.are_of_network}
        program: TrialProgram = made(config, **order.arguments, **extra)
        return program

    def _keep(self, order: Order, progress: Progress, metrics: dict[str, float]) -> tuple[StatePlace, bool]:
        """Lay the state aside, and into its file where that is due."""
        assert self._program is not None
        place = self._vault.put(order.trial, order.report, self._program.state())
        if order.is_exact:
            self._vault.write_beside(order.trial)
        try:
            score: float | None = self._rules.objectives.scores(metrics)[0]
        except OrchestrayError:
            score = None  # the driver says it
        if order.bar is not None and score is not None and score >= order.bar:
            self._vault.save_now(order.trial)
            return place, True
        is_due = not order.is_exact and time.monotonic() - self._saved_s >= self._rules.save_every_s
        if is_due and self._vault.save(order.trial) is not None:
            self._saved_s = time.monotonic()
        return place, False

    @contextlib.contextmanager
    def _limited_time(self) -> Iterator[None]:
        """Have a program that can be stopped stop when the trial's time is up."""
        limit_s = self._rules.time_limit_s
        if limit_s is None:
            yield
            return
        alarm = threading.Timer(max(0.0, limit_s - self._used_s), self.stop)
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _out_of_memory(self, error: BaseException) -> TrainingError:
        self._drop()  # what it holds is needed
        limit_mb = self._rules.memory_mb
        limit = f": its process may hold {limit_mb:g} MB" if limit_mb is not None else ""
        return TrainingError(f"The trial ran out of memory{limit}. {str(error).splitlines()[0] if str(error) else ''}")


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch says it in a RuntimeError, which the training loop may have put into one of its own."""
    return isinstance(error, MemoryError) or "Cannot allocate memory" in str(error) or "out of memory" in str(error)


def _failed(order: Order, error: BaseException, began_s: float) -> Told:
    text = str(error) if isinstance(error, OrchestrayError) else f"{type(error).__name__}: {error}"
    shown = "".join(traceback.format_exception(error))
    seconds = time.monotonic() - began_s
    return Told(order.trial, seconds=seconds, error=text, traceback=shown)


@contextlib.contextmanager
def _limited_memory(limit_mb: float | None) -> Iterator[None]:
    """Within it this process cannot come to hold more than so much: an allocation beyond fails, and nothing else."""
    if limit_mb is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resident, data = _status_bytes("VmRSS"), _status_bytes("VmData")
    if resident > limit_mb * 2**20:
        raise TrainingError(
            f"search.budget.trial_memory_mb is {limit_mb:g}, and the process of a trial holds "
            f"{resident / 2**20:.0f} MB before the trial begins."
        )
    # The kernel's limit counts what is reserved, not what is used: it may grow by what is left.
    most = data + int(limit_mb * 2**20) - resident
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _status_bytes(name: str) -> int:
    """What the kernel says of this process: `VmRSS`, memory in use; `VmData`, what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
