"""The process of a trial without Ray: builds programs, moves states, keeps limits; what goes wrong is an answer."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError, PlaceLostError, StorageError, TrainingError
from orchestray.platform.gang.member import give_back_freed_memory
from orchestray.search.engine.abilities import (
    Changeable,
    Closable,
    CostlyToPause,
    Foreseeing,
    Heir,
    Measured,
    Stoppable,
)
from orchestray.search.engine.memory_limit import limited_memory
from orchestray.search.engine.orders import GANG, ORDINARY, Order, Rules, Told
from orchestray.search.engine.state_files import KEPT, ON_THE_WAY, StateFiles, StateLostError
from orchestray.search.engine.vault import Vault
from orchestray.search.trials.shelf import Shelf

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.engine.gang_trial import Room
    from orchestray.search.engine.state_files import StatePlace
    from orchestray.search.trials.program import Progress, TrialProgram, TrialState


_PAUSED_SHARE = 0.05
"""Of a trial's time, at most, goes into pauses in which its state is taken for its file."""
_MOST_BETWEEN_SAVES_S = 600.0
"""However long a pause is: what a trial has done since is lost with its process."""


class TrialHost:
    """Carries out one order after the other; keeps data, tasks and states between trials."""

    def __init__(self, rules: Rules, *, address: str = "127.0.0.1") -> None:
        """
        Args:
            rules: of the search.
            address: at which other machines reach this one.
        """
        self._rules, self._address = rules, address
        self._shelf = Shelf()
        self._vault = Vault(StateFiles(rules.directory), host=address)
        self._program: TrialProgram | None = None
        self._made_by = ""
        """What the program is, as orders name it."""
        self._trial = -1
        self._config: TrainConfig | None = None
        self._used_s = self._told_s = 0.0
        """That the trial has worked, in other processes too, and how much of it the driver knows."""
        self._since_s = 0.0
        """From when on its work is not counted there yet, by the monotonic clock."""
        self._saved_s = 0.0
        """When the trial's state was last sent to its file, likewise."""
        self._evaluations: list[Mapping[str, float]] = []
        """Of the trial since its last report."""
        self._halted = threading.Event()
        self._are_named = not rules.objectives.of_task
        """Whether the task is known to have the metrics that are looked for."""
        self._room: Room | None = None
        """Of the workers of trials that have several."""

    def work(self, order: Order) -> Told:
        """Carry out an order; whatever goes wrong with the trial is in the answer.

        Raises:
            PlaceLostError: the places of this process are no more: the trial can go on in another only.
        """
        self._since_s = time.monotonic()
        try:
            if self._is_new(order):
                self._make_room()
            with limited_memory(self._rules.memory_mb):
                told = self._work(order)
        except PlaceLostError:
            raise
        except StorageError as error:
            return replace(_failed(order, error, self._seconds()), is_unsaved=True)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises, the trial has failed, not the search
            shown = self._out_of_memory(error) if _is_out_of_memory(error) else error
            return _failed(order, shown, self._seconds())
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
            is_there = self._begin(order)
            assert self._program is not None
            if not is_there:  # its file is lost: training leads there again
                self._program.advance(order.until)
            self._program.leave_run(Path(directory))
        except Exception as error:  # noqa: BLE001 - as in `work`
            return _failed(order, error, time.monotonic() - began_s)
        return Told(order.trial, seconds=time.monotonic() - began_s)

    def close(self) -> None:
        """Hand nothing out any more; what is being written is finished."""
        with contextlib.ExitStack() as stack:  # each of them, though another fails
            stack.callback(self._vault.close)
            if self._room is not None:
                stack.callback(self._room.close)
            self._drop()

    def _work(self, order: Order) -> Told:
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
            return Told(order.trial, seconds=self._seconds(), error=problem, is_misnamed=True)
        progress = self._advance(order)
        seconds = self._seconds()
        if progress is None:
            return Told(order.trial, seconds=seconds, is_halted=True)
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

    def _advance(self, order: Order) -> Progress | None:
        """Train up to the next report, with the state written to its file on the way; None: it was told to halt.

        Raises:
            TrainingError: the trial's time is up.
        """
        assert self._program is not None
        limit_s = self._rules.time_limit_s
        while not self._halted.is_set():  # in the meantime; what is built has not begun
            with self._stopped_after(self._pause_s()):
                progress = self._program.advance(order.until)
            self._count()
            self._evaluations += progress.evaluations
            if self._halted.is_set():
                self._lay_aside(order, is_on_the_way=progress.is_interrupted)
                self._vault.write_beside(order.trial)
                break
            if limit_s is not None and self._used_s > limit_s:
                raise TrainingError(f"The trial ran out of its time limit of {limit_s:g} s at step {progress.step}.")
            if not progress.is_interrupted:
                return replace(progress, evaluations=tuple(self._evaluations))
            self._lay_aside(order, is_on_the_way=True)
            self._vault.save(order.trial, keeps_earlier=order.is_exact)
            self._saved_s = time.monotonic()
        return None

    def _pause_s(self) -> float | None:
        """Seconds until the program is to stop on its way, for its time or to have its state written; None: never."""
        self._count()
        limit_s, every_s = self._rules.time_limit_s, self._save_every_s()
        left = [] if limit_s is None else [limit_s - self._used_s]
        if every_s > 0:
            left.append(self._saved_s + every_s - time.monotonic())
        return max(0.0, min(left)) if left else None

    def _save_every_s(self) -> float:
        """Between two pauses in which the state is taken for its file; 0: there are none."""
        every_s = self._rules.save_every_s
        program: object = self._program
        if every_s > 0 and isinstance(program, CostlyToPause):
            return max(every_s, min(program.pause_cost_s / _PAUSED_SHARE, _MOST_BETWEEN_SAVES_S))
        return every_s

    def _count(self) -> None:
        now_s = time.monotonic()
        self._used_s += now_s - self._since_s
        self._since_s = now_s

    def _seconds(self) -> float:
        """That the trial has worked and the driver has not heard of yet."""
        self._count()
        seconds, self._told_s = self._used_s - self._told_s, self._used_s
        return seconds

    def _misnamed(self) -> str | None:
        """What is wrong with the objectives' names, found before the first trial of this process is trained."""
        if self._are_named:
            return None
        self._are_named = True
        program: object = self._program
        objectives = self._rules.objectives
        known = program.metric_names(objectives.of_task) if isinstance(program, Foreseeing) else None
        return None if known is None else objectives.misnamed(known)

    def _begin(self, order: Order) -> bool:
        """Build the trial; returns whether it is in the state that it is to begin with."""
        assert order.config is not None
        self._drop()
        self._trial = order.trial
        self._used_s = self._told_s = order.used_s
        self._saved_s, self._evaluations = time.monotonic(), []
        self._program = self._build(order, order.config)
        self._config = order.config
        return order.source is not None and self._take(order, order.source)

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
        from orchestray.search.engine.gang_trial import Room

        self._room = self._room or Room(self._address)
        rules = self._rules
        return {"room": self._room, "directory": rules.directory, "cpus_per_worker": rules.cpus_per_worker}

    def _take(self, order: Order, place: StatePlace) -> bool:
        """Take a state; returns whether it was there.

        Where it is lost for good a trial begins again, which comes to the same; not so where it may have been
        another's.
        """
        assert self._program is not None
        try:
            state = self._vault.fetch(place, exact=order.is_exact)
        except StateLostError:
            if order.is_exact:
                raise
            return False
        state, kept = _apart(state)
        if place.trial == order.trial and kept:
            self._used_s = max(self._used_s, kept["used_s"])  # of the way here the driver has not heard
            if kept["report"] == order.report:
                self._evaluations = list(kept["evaluations"])
        if order.partly and isinstance(self._program, Heir):
            self._program.inherit(state, overlap=order.overlaps)
        else:
            self._program.load(state, partly=order.partly)
        return True

    def _build(self, order: Order, config: TrainConfig) -> TrialProgram:
        module, _, name = order.program.partition(":")
        made: Any = getattr(importlib.import_module(module), name)
        extra: dict[str, Any] = {}
        if order.program == ORDINARY:
            extra = {"shelf": self._shelf, "is_measured": self._rules.objectives.are_of_network}
        elif order.program == GANG:
            extra = {**self._for_gangs(), "is_measured": self._rules.objectives.are_of_network}
        program: TrialProgram = made(config, **order.arguments, **extra)
        self._made_by = order.program
        return program

    def _keep(self, order: Order, progress: Progress, metrics: dict[str, float]) -> tuple[StatePlace, bool]:
        """Lay the state aside, and into its file where that is due."""
        place = self._lay_aside(order)
        self._evaluations = []
        if order.is_exact:
            self._vault.write_beside(order.trial)
            self._saved_s = time.monotonic()
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

    def _lay_aside(self, order: Order, *, is_on_the_way: bool = False) -> StatePlace:
        """Have the vault hold the state, with what its next report has to tell of the way so far."""
        assert self._program is not None
        state = self._program.state()
        evaluations = [dict(one) for one in self._evaluations]
        kept = {
            "report": order.report,
            "evaluations": evaluations,
            "used_s": round(self._used_s, 6),
            ON_THE_WAY: is_on_the_way,
        }
        return self._vault.put(order.trial, order.report, replace(state, position={**state.position, KEPT: kept}))

    @contextlib.contextmanager
    def _stopped_after(self, seconds: float | None) -> Iterator[None]:
        """Have a program that can be stopped stop after so many seconds."""
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
        self._drop()  # what it holds is needed
        limit_mb = self._rules.memory_mb
        limit = f": its process may hold {limit_mb:g} MB" if limit_mb is not None else ""
        return TrainingError(f"The trial ran out of memory{limit}. {str(error).splitlines()[0] if str(error) else ''}")


def _apart(state: TrialState) -> tuple[TrialState, dict[str, Any]]:
    """A state as its program made it, and what was kept with it."""
    position = dict(state.position)
    kept = position.pop(KEPT, {})
    return replace(state, position=position), kept


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch says it in a RuntimeError, which the training loop may have put into one of its own."""
    return isinstance(error, MemoryError) or "Cannot allocate memory" in str(error) or "out of memory" in str(error)


def _failed(order: Order, error: BaseException, seconds: float) -> Told:
    text = str(error) if isinstance(error, OrchestrayError) else f"{type(error).__name__}: {error}"
    shown = "".join(traceback.format_exception(error))
    return Told(order.trial, seconds=seconds, error=text, traceback=shown)
