"""The part of a run's time that was worth something: goodput."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_NUM_GAPS = 101
"""Number of undisturbed steps whose median says how long a step takes."""


@dataclass(frozen=True)
class _Recovery:
    """The time between two steps that count, in which something was lost."""

    began_s: float
    """End of the last step before."""
    took_s: float
    """Time until the end of the first step after."""


class Goodput:
    """A clock of the time of steps that counted, over the wall time of training.

    The time from one step that counts to the next counts as a whole: step, validation, checkpoint, waiting for data.
    If a process was lost in it, only the median time of the last undisturbed steps counts. The rest is lost: the step
    that broke, noticing it, waiting for a replacement, and meeting again. When a run goes back to a checkpoint, the
    steps after it have not counted. All the time since the checkpoint's step is lost then, but for that of one step.

    All times are in seconds of the run.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._last_s = 0.0
        """End of the last step that counts; before the first step, the beginning."""
        self._has_steps = self._went_back = False
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._recoveries: list[_Recovery] = []

    def begin(self, now_s: float) -> None:
        """Note that the training of this command begins; what was seen before is an earlier command's."""
        self._began_s = self._last_s = now_s
        self._has_steps = self._went_back = False

    def complete(self, time_s: float, *, after_loss: bool) -> None:
        """Note the end of a step that counts, as far as is known now.

        Args:
            time_s: end of the step.
            after_loss: True if a process was lost since the step before.
        """
        if self._began_s is None:  # a line of an earlier command, or the copy of one
            return
        took_s = max(0.0, time_s - self._last_s)
        if after_loss or self._went_back:
            self._recoveries.append(_Recovery(self._last_s, took_s))
        else:
            self._gaps.append(took_s)
        self._last_s, self._has_steps, self._went_back = max(self._last_s, time_s), True, False

    def go_back(self, time_s: float | None) -> None:
        """Note that no step after `time_s` counts any more; None: no step counts."""
        if self._began_s is None:
            return
        self._went_back = True
        self._last_s = max(self._began_s, self._began_s if time_s is None else time_s)
        self._recoveries = [one for one in self._recoveries if one.began_s < self._last_s]

    @property
    def step_s(self) -> float:
        """Median seconds of the last undisturbed steps; 0 before the first."""
        return statistics.median(self._gaps) if self._gaps else 0.0

    def value(self, now_s: float, *, is_recovering: bool) -> float | None:
        """Return the goodput until now, from 0 to 1; None before the first step.

        Args:
            now_s: time now.
            is_recovering: True if a process is lost and no step has been completed since: the time since the last step
                is lost.
        """
        if self._began_s is None or not self._has_steps or now_s <= self._began_s:
            return None
        lost_s = sum(max(0.0, one.took_s - self.step_s) for one in self._recoveries)
        lost_s += max(0.0, now_s - self._last_s) if is_recovering else 0.0
        return round(min(1.0, max(0.0, 1.0 - lost_s / (now_s - self._began_s))), 4)
