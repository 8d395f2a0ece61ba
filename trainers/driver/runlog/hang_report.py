"""The driver's report of a run that makes no steps: which worker is silent or stuck, and who waits for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from orchestray.platform.terminal.format import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.actors.slot import State
    from orchestray.trainers.driver.runlog.run_log import RunLog

_STEPS = 10.0
"""Number of steps whose time must pass without one."""
_SILENT_S = 15.0
"""Seconds after which it is said that a process does not answer."""
_SHOWN_S = 5.0
"""Seconds without a step after which a live display says why, as far as it is known."""
_DOES = {
    "starting": "has been starting",
    "building": "has been building its task and model",
    "silent": "has not answered",
    "working": "has computed or read data without an end",
}


class Watched(Protocol):
    """Processes of one role whose states are known: a gang, or the workers of Ray Train."""

    shape: Shape

    def states(self, now_s: float) -> list[State | None]:
        """Return the state of each, by rank; None for one that is dead."""
        ...


class HangReport:
    """A report of a run's silence. It changes nothing: workers are replaced by other rules, and later."""

    def __init__(
        self,
        run_log: RunLog,
        gangs: Sequence[Watched],
        report_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            run_log: log of the run.
            gangs: its processes, the workers first.
            report_s: seconds without a step after which it is reported, unless ten steps take longer; None: never.
            clock: returns seconds.
        """
        self._run_log, self._gangs, self._report_s, self._clock = run_log, gangs, report_s, clock
        self._step, self._since_s = -1, clock()
        self._next_s = 0.0
        """Seconds without a step at which it is reported next."""
        self._silent: set[str] = set()
        self._shown: str | None = None

    def look(self) -> None:
        """Report what there is to report; call this repeatedly."""
        now_s, progress = self._clock(), self._run_log.run_progress
        patience_s = max(self._report_s or 0.0, _STEPS * progress.goodput.step_s)
        if progress.last_step != self._step:
            self._step, self._since_s, self._next_s = progress.last_step, now_s, patience_s
            self._silent.clear()
            self._show(None)
        quiet_s = now_s - self._since_s
        if quiet_s < min(_SHOWN_S, self._report_s or _SHOWN_S):
            return
        states = {
            f"{gang.shape.role.replace('_', ' ')} {rank}": state
            for index, gang in enumerate(self._gangs)
            for rank, state in enumerate(gang.states(now_s))
            if state is not None and (index == 0 or state.kind == "silent")  # servers only answer
        }
        self._name_silent(states)
        is_going_on = any(state.kind == "working" and state.for_s < patience_s for state in states.values())
        if quiet_s >= max(_SHOWN_S, _STEPS * progress.goodput.step_s) and self._step > 0 and not is_going_on:
            self._show(_sentence(quiet_s, states))
        if self._report_s is None or quiet_s < max(patience_s, self._next_s) or is_going_on:
            return
        self._next_s = 2.0 * quiet_s
        text = _sentence(quiet_s, states, progress.goodput.step_s)
        self._run_log.progress.warn(f"{text}. `orchestray runs stacks` shows where each process is")
        kinds = {name: state.kind for name, state in states.items()}
        self._run_log.writer.event("no_progress", step=self._step, seconds=round(quiet_s, 3), processes=kinds)

    def _name_silent(self, states: dict[str, State]) -> None:
        """Say once of each process that it does not answer."""
        for name, state in states.items():
            if state.kind == "silent" and state.for_s >= _SILENT_S and name not in self._silent:
                self._silent.add(name)
                self._run_log.progress.event(f"{name} has not answered for {duration(state.for_s)}")
                role, _, rank = name.replace(" ", "_").rpartition("_")
                self._run_log.writer.event("no_answer", role=role, rank=int(rank), seconds=round(state.for_s, 3))

    def _show(self, text: str | None) -> None:
        if text != self._shown:
            self._shown = text
            self._run_log.progress.set_silence(text)


def _sentence(quiet_s: float, states: dict[str, State], step_s: float = 0.0) -> str:
    """Return for how long there was no step, which takes `step_s`, who is to blame, and who waits for it."""
    waiting = [name for name, state in states.items() if state.kind == "waiting"]
    others = {name: state for name, state in states.items() if state.kind in _DOES}
    parts = [f"{name} {_DOES[state.kind]} for {duration(state.for_s)}" for name, state in others.items()]
    if waiting:
        them = ("it" if len(others) == 1 else "them") if others else "each other" if waiting[1:] else "another process"
        parts.append(f"{_listed(waiting)} wait{'s' if len(waiting) == 1 else ''} for {them}")
    takes = f" (one takes {duration(step_s) if step_s >= 1.0 else f'{1000 * step_s:.3g} ms'})" if step_s else ""
    return f"no step for {duration(quiet_s)}{takes}" + (f": {'; '.join(parts)}" if parts else "")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
