"""The log of a worker's actions with their times: cheap enough to be always on."""

from __future__ import annotations

import time
from typing import Any

from orchestray.trainers.parallel.pipeline.schedules.actions import Action

StepTimes = tuple[int, float, float]
"""Step, begin of its first action, and end of the last action of the step before it; wall clock, seconds."""

_UNKNOWN_BEGIN, _UNKNOWN_END = float("inf"), 0.0


class ActionLog:
    """A log of the begin and end of each action, and of the span of each step over all workers of the copy.

    No worker sees all of a step, so its times are sent along with the tensors. All workers know the end of a step once
    the next one has ended: `take` covers the steps up to the last but one. Between machines, begin and end are as
    inaccurate as the clocks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self._begin_s = _UNKNOWN_BEGIN
        self._end_s = _UNKNOWN_END
        self._busy_s = 0.0
        self._before: tuple[int, float, float, float] | None = None
        """The step before: its number, begin, end (over all workers, as far as
        known) and this worker's busy seconds.
        """
        self._entries: list[dict[str, Any]] = []
        self._entries_before: list[dict[str, Any]] = []
        self._done_busy_s = 0.0
        self._done_span_s = 0.0
        self._own_busy_s = 0.0

    def begin_step(self, step: int) -> None:
        """Begin a step: the actions that follow belong to it."""
        if self._step:
            self._before = (self._step, self._begin_s, self._end_s, self._busy_s)
        self._step = step
        self._begin_s, self._end_s, self._busy_s = _UNKNOWN_BEGIN, _UNKNOWN_END, 0.0
        self._entries_before, self._entries = self._entries, []

    def end_step(self) -> None:
        """End a step: all its actions are done and all messages have come, so the step before is complete."""
        if self._before is not None:
            _, begin_s, end_s, busy_s = self._before
            self._done_busy_s += busy_s
            self._done_span_s += max(0.0, end_s - begin_s)
            self._before = None

    def add(self, action: Action, begin_s: float, end_s: float) -> None:
        """Record an action that is done."""
        self.count(end_s - begin_s)
        self._begin_s = min(self._begin_s, begin_s)
        self._end_s = end_s
        self._entries.append(
            {
                "rank": self._rank,
                "step": self._step,
                "stage": action.stage,
                "kind": str(action.kind),
                "micro_batch": action.micro_batch,
                "begin_s": begin_s,
                "end_s": end_s,
            }
        )

    def count(self, busy_s: float) -> None:
        """Count busy time outside of actions."""
        self._busy_s += busy_s
        self._own_busy_s += busy_s

    def step_times(self) -> StepTimes:
        """Return this worker's times, to be sent to another worker with the tensors of an action."""
        return self._step, self._begin_s, _UNKNOWN_END if self._before is None else self._before[2]

    def take_in(self, step_times: StepTimes) -> None:
        """Take in the times that another worker has sent; those of a step that has not begun here are ignored."""
        step, begin_s, end_before_s = step_times
        if step == self._step:
            self._begin_s = min(self._begin_s, begin_s)
            if self._before is not None:
                before, begun_s, end_s, busy_s = self._before
                self._before = (before, begun_s, max(end_s, end_before_s), busy_s)

    def take(self) -> tuple[float, float]:
        """Return the busy seconds here and the span over all workers, of the steps
        found complete since the last call.
        """
        taken = self._done_busy_s, self._done_span_s
        self._done_busy_s = self._done_span_s = 0.0
        return taken

    def take_own(self) -> float:
        """Return all busy seconds here since the last call."""
        taken, self._own_busy_s = self._own_busy_s, 0.0
        return taken

    def timeline(self) -> list[dict[str, Any]]:
        """Return the actions of the last two steps: rank, step, stage, kind,
        micro_batch, begin_s and end_s (wall clock).
        """
        return [*self._entries_before, *self._entries]


now_s = time.time
