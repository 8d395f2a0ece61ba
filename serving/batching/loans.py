"""Runners shared with other batchers: requested while requests wait, given back when none do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import RunnerHandle


class Loans:
    """The requests of one batcher to the lenders of its shared runners.

    Args:
        queue: requests that wait.
        runners: runners of the batcher, which changes this list and the queue.
    """

    def __init__(self, queue: RequestQueue[Any, Any], runners: Sequence[RunnerHandle[Any, Any]]) -> None:
        self._queue = queue
        self._runners = runners
        self._oldest: Request[Any, Any] | None = None

    def settle(self, now_s: float) -> None:
        """Request shared runners while requests wait, and say for how long; give back those that are not needed."""
        shared = [runner for runner in self._runners if runner.lender is not None]
        if not shared:
            return
        oldest = self._find_oldest()
        if oldest is not self._oldest:
            self._oldest = oldest
            for runner in shared:
                self._want(runner, now_s)
        for runner in shared:
            if runner.idle and not self._queue and runner.lender is not None:
                runner.granted = runner.hurried = False
                runner.lender.give_back()

    def introduce(self, runner: RunnerHandle[Any, Any], now_s: float) -> None:
        """Tell the lender of a new runner how long requests have waited."""
        if self._oldest is not None:
            self._want(runner, now_s)

    def requeued(self) -> None:
        """Note that a request came back to the queue, where it is older than the others."""
        self._oldest = None

    def _want(self, runner: RunnerHandle[Any, Any], now_s: float) -> None:
        if runner.lender is not None:
            runner.lender.want(None if self._oldest is None else now_s - self._oldest.arrived_s)

    def _find_oldest(self) -> Request[Any, Any] | None:
        if self._oldest is not None and self._oldest.queued:
            return self._oldest  # all that came since are younger
        return min(self._queue.first(len(self._queue)), key=lambda request: request.arrived_s, default=None)
