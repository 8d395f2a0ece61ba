"""Lines for the run's log that are fetched from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.trainers.driver.runlog.run_log import RunLog

ANSWER_TIMEOUT_S = 15.0
"""Seconds that a driver waits for a process that may be frozen."""


class LineFetcher:
    """A fetcher that requests a process's lines and records them, one request at a time.

    A process hands over each line once, and some events are only there. So a request that is not answered in time stays
    open, and its answer is taken before the next request. No line of a slow process is lost, or comes before an older
    one. If the process is dead, Ray raises an error. Then the other processes' copies have the metric lines, and a
    checkpoint carries those after `RunProgress.written_step`.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        self._asked: Any = None

    def ask(self, send: Callable[[], Any]) -> Any:
        """Return the Ray reference of the next answer.

        Args:
            send: sends a request and returns its reference; not called while an earlier request is open.
        """
        if self._asked is None:
            self._asked = send()
        return self._asked

    def take(self) -> bool:
        """Wait for the answer to the open request, for a while, and record it; return True if there was anything.

        The death of the process is not reported here.
        """
        if self._asked is None:
            return False
        try:
            lines = ray.get(self._asked, timeout=ANSWER_TIMEOUT_S)
        except GetTimeoutError:
            return False
        except RayError:
            lines = None
        self._asked = None
        if not isinstance(lines, list):
            return False
        self._run_log.record(lines)
        return bool(lines)


def copies_of(references: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the copies of lines from all processes that answer; each has all lines.

    Args:
        references: Ray references of the answers.
    """
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=ANSWER_TIMEOUT_S)
    copies: list[dict[str, Any]] = []
    for reference in ready:
        try:
            lines = ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        except RayError:  # dead, or its machine is gone with the answer
            continue
        if isinstance(lines, list):
            copies += lines
    return copies
