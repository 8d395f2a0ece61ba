"""What a worker did when: cheap enough to be always on."""

from __future__ import annotations

import time
from typing import Any

from orchestray.trainers.pipeline.actions import Action

Told = tuple[int, float, float]
"""A step, when its first action began, and when the last action of the step before it ended; wall clock, seconds."""

_UNKNOWN_BEGIN, _UNKNOWN_END = float("inf"), 0.0


class ActionLog:
    """Begin and end of each action, and from where to where a step went over all workers of the copy.

    No worker sees all of a step, so what each knows rides along with the tensors. When a step ended is known to all by
    the end of the next one: `take` speaks of the steps up to the last but one. Between machines the begin and end are
    as far off as their clocks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self._begin_s = _UNKNOWN_BEGIN
        self._end_s = _UNKNOWN_END
        self._busy_s = 0.0
        self._before: tuple[int, float, float, float] | None = None
        """The step before: its number, begin, end (of all workers, as far as known) and this worker's busy seconds."""
        self._entries: list[dict[str, Any]] = []
        self._entries_before: list[dict[str, Any]] = []
        self._done_busy_s = 0.0
        self._done_span_s = 0.0
        self._own_busy_s = 0.0

    def begin_step(self, step: int) -> None:
        """The actions that follow are of this step."""
        if self._step:
            self._before = (self._step, self._begin_s, self._end_s, self._busy_s)
        self._step = step
        self._begin_s, self._end_s, self._busy_s = _UNKNOWN_BEGIN, _UNKNOWN_END, 0.0
        self._entries_before, self._entries = self._entries, []

    def end_step(self) -> None:
        """All actions of the step are done, and all messages of the others have come: the step before is known."""
        if self._before is not None:
            _, begin_s, end_s, busy_s = self._before
            self._done_busy_s += busy_s
            self._done_span_s += max(0.0, end_s - begin_s)
            self._before = None

    def add(self, action: Action, begin_s: float, end_s: float) -> None:
        """An action is done."""
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
        """Time well spent outside of actions."""
        self._busy_s += busy_s
        self._own_busy_s += busy_s

    def told(self) -> Told:
        """For another worker, with the tensors of an action."""
        return self._step, self._begin_s, _UNKNOWN_END if self._before is None else self._before[2]

    def hear(self, told: Told) -> None:
        """What another worker told with its tensors; of a step that has not begun here it is of no use yet."""
        step, begin_s, end_before_s = told
        if step == self._step:
            self._begin_s = min(self._begin_s, begin_s)
            if self._before is not None:
                before, begun_s, end_s, busy_s = self._before
                self._before = (before, begun_s, max(end_s, end_before_s), busy_s)

    def take(self) -> tuple[float, float]:
        """Busy seconds here and the span over all workers, of the steps known to be over since the last call."""
        taken = self._done_busy_s, self._done_span_s
        self._done_busy_s = self._done_span_s = 0.0
        return taken

    def take_own(self) -> float:
        """Busy seconds here since the last call, of all that is done."""
        taken, self._own_busy_s = self._own_busy_s, 0.0
        return taken

    def timeline(self) -> list[dict[str, Any]]:
        """The actions of the last two steps: rank, step, stage, kind, micro_batch, begin_s and end_s (wall clock)."""
        return [*self._entries_before, *self._entries]


now_s = time.time
