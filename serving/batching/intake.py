"""Admission of requests: which enter the queue, which are refused, and which leave it unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from orchestray.serving.batching.core import Core
from orchestray.serving.batching.errors import BatcherClosedError, DeadlineError, QueueFullError
from orchestray.serving.batching.listener import SHED_EXPIRED, SHED_INFEASIBLE, SHED_QUEUE_FULL
from orchestray.serving.batching.outcomes import fail
from orchestray.serving.batching.queue import PATIENCE_S, Request

In = TypeVar("In")
Out = TypeVar("Out")

_ROOM_ONCE_READ = 0.5
"""Fraction of the reserve for prediction errors that still applies when a request that `refusal` let through is put.

With the full reserve, changes since then would refuse many of those after they have already been read and parsed.
"""


class Intake(Generic[In, Out]):
    """The entry to the queue of a batcher.

    Args:
        core: shared state of the batcher.
        max_queue: largest number of requests that may wait.
        look_soon: called when one more request waits.
    """

    def __init__(self, core: Core[In, Out], max_queue: int, look_soon: Callable[[], None]) -> None:
        self._core = core
        self._max_queue = max_queue
        self._look_soon = look_soon
        self._num_requests = 0
        self._last_reason = SHED_QUEUE_FULL
        """Reason for which `refusal` refused the last request."""
        self._num_let_through = 0
        """Requests that `refusal` let through and that have not been put yet, or never will be."""

    def put(self, item: In, *, priority: int, deadline_s: float | None) -> asyncio.Future[Out]:
        """Add a request to the queue and return its future; raise if it is refused (see `Batcher.put`)."""
        core, loop = self._core, self._core.loop
        if core.closed:
            raise BatcherClosedError("The batcher was closed and takes no more requests.")
        now_s = loop.time()
        self._note_arrival(now_s)
        self._num_requests += 1
        request: Request[In, Out] = Request(
            item,
            loop=loop,
            number=self._num_requests,
            priority=priority,
            deadline_s=deadline_s,
            on_cancel=core.forget,
        )
        if deadline_s is not None:
            room = 1.0
            if self._num_let_through:
                self._num_let_through -= 1
                room = _ROOM_ONCE_READ
            expected_s = core.admission.expected_s(request.key, deadline_s, now_s, room=room)
            if expected_s is None:
                core.count_shed(SHED_INFEASIBLE)
                raise DeadlineError(core.admission.retry_after_s(now_s))
            request.expected_s = expected_s
        if len(core.queue) >= self._max_queue:
            self._make_room(request)
        core.queue.push(request)
        if deadline_s is not None:
            request.timer = loop.call_at(deadline_s, self._expire, request)
        self._look_soon()
        return request

    def refusal(self, deadline_s: float | None, num_coming: int) -> QueueFullError | DeadlineError | None:
        """Return the error with which a request would be refused now, or None (see `Batcher.refusal`)."""
        core = self._core
        now_s = core.loop.time()
        if core.closed:
            return None
        error: QueueFullError | DeadlineError | None = None
        if deadline_s is not None:
            key = self._key_of_next(deadline_s)
            if core.admission.expected_s(key, deadline_s, now_s, num_coming) is None:
                self._last_reason = SHED_INFEASIBLE
                error = DeadlineError(core.admission.retry_after_s(now_s))
        if error is None and len(core.queue) >= self._max_queue and core.queue.last().key[0] <= 0:
            self._last_reason = SHED_QUEUE_FULL
            error = QueueFullError(self._max_queue, core.admission.retry_after_s(now_s))
        if error is not None:
            self.refused_again()
        elif deadline_s is not None:
            self._num_let_through = min(self._num_let_through + 1, self._max_queue)
        return error

    def refused_again(self) -> None:
        """Count one more refusal, for the reason of the last one."""
        self._core.count_shed(self._last_reason)
        self._note_arrival(self._core.loop.time())

    def queue_s(self, deadline_s: float | None, num_coming: int) -> float:
        """Return the seconds in full batches ahead of such a request (see `Batcher.queue_s`)."""
        core = self._core
        key = self._key_of_next(core.loop.time() + PATIENCE_S if deadline_s is None else deadline_s)
        return core.admission.queue_s(key, num_coming)

    def _key_of_next(self, deadline_s: float) -> tuple[int, float, int]:
        """Return the sort key of the next request, with priority 0."""
        return (0, deadline_s, self._num_requests + 1)

    def _note_arrival(self, now_s: float) -> None:
        self._core.policy.arrived(now_s)
        self._core.admission.arrived(now_s)

    def _make_room(self, request: Request[In, Out]) -> None:
        """Refuse the new request, or the last in the queue if that has a lower priority."""
        core = self._core
        last = core.queue.last()
        error = QueueFullError(self._max_queue, core.admission.retry_after_s(request.arrived_s))
        core.count_shed(SHED_QUEUE_FULL)
        if last.key[0] <= request.key[0]:
            raise error
        core.queue.remove(last)
        fail(last, error)

    def _expire(self, request: Request[In, Out]) -> None:
        """Fail a request whose deadline has passed: it is dropped if it waits, and too late if it runs.

        A request in a batch that its runner has not begun still waits, for the batch before it.
        """
        if request.done():
            return
        core = self._core
        waited = request.queued or (request.after is not None and not request.after.done())
        core.forget(request)
        core.count_shed(SHED_EXPIRED)
        fail(request, DeadlineError(core.admission.retry_after_s(request.deadline_s) if waited else None))
