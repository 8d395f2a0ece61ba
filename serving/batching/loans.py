"""Runners that other batchers use too: asked for while somebody waits, given back when nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import RunnerHandle


class Loans:
    """What one batcher has told the lenders of its shared runners.

    Args:
        queue: what waits.
        runners: of the batcher, which changes both.
    """

    def __init__(self, queue: RequestQueue[Any, Any], runners: Sequence[RunnerHandle[Any, Any]]) -> None:
        self._queue = queue
        self._runners = runners
        self._oldest: Request[Any, Any] | None = None

    def settle(self, now_s: float) -> None:
        """Ask for shared runners while somebody waits, telling for how long; give back those that nobody needs."""
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
        """A runner has come: it is told what the others know."""
        if self._oldest is not None:
            self._want(runner, now_s)

    def requeued(self) -> None:
        """A request has come back to the queue, and is older than who waits there."""
        self._oldest = None

    def _want(self, runner: RunnerHandle[Any, Any], now_s: float) -> None:
        if runner.lender is not None:
            runner.lender.want(None if self._oldest is None else now_s - self._oldest.arrived_s)

    def _find_oldest(self) -> Request[Any, Any] | None:
        if self._oldest is not None and self._oldest.queued:
            return self._oldest  # all that came since are younger
        return min(self._queue.first(len(self._queue)), key=lambda request: request.arrived_s, default=None)
