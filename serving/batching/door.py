"""Where requests come in: what is taken into the queue, what is refused, and what leaves it unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from orchestray.serving.batching.core import Core
from orchestray.serving.batching.errors import BatcherClosedError, DeadlineError, QueueFullError
from orchestray.serving.batching.listener import SHED_EXPIRED, SHED_INFEASIBLE, SHED_QUEUE_FULL
from orchestray.serving.batching.outcomes import fail
from orchestray.serving.batching.queue import Request

In = TypeVar("In")
Out = TypeVar("Out")

_ROOM_OF_KNOWN = 0.5
"""Where requests are judged before they are read: what has changed since refuses few of those let through."""


class Door(Generic[In, Out]):
    """Admits requests to the queue of a batcher.

    Args:
        core: of the batcher.
        max_queue: requests that may wait, at most.
        look_soon: is called when one more waits.
    """

    def __init__(self, core: Core[In, Out], max_queue: int, look_soon: Callable[[], None]) -> None:
        self._core = core
        self._max_queue = max_queue
        self._look_soon = look_soon
        self._num_requests = 0
        self._room = 1.0
        """Of what predictions leave out, how much a request is still to have when it is put."""

    def put(self, item: In, *, priority: int, deadline_s: float | None) -> asyncio.Future[Out]:
        """See `Batcher.put`."""
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
            expected_s = core.admission.expected_s(request.key, deadline_s, now_s, room=self._room)
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
        """See `Batcher.refusal`."""
        core = self._core
        now_s = core.loop.time()
        self._room = _ROOM_OF_KNOWN
        if core.closed:
            return None
        error: QueueFullError | DeadlineError | None = None
        if deadline_s is not None:
            key = (0, deadline_s, self._num_requests + 1)
            if core.admission.expected_s(key, deadline_s, now_s, num_coming) is None:
                core.count_shed(SHED_INFEASIBLE)
                error = DeadlineError(core.admission.retry_after_s(now_s))
        if error is None and len(core.queue) >= self._max_queue and core.queue.last().key[0] <= 0:
            core.count_shed(SHED_QUEUE_FULL)
            error = QueueFullError(self._max_queue, core.admission.retry_after_s(now_s))
        if error is not None:
            self._note_arrival(now_s)
        return error

    def _note_arrival(self, now_s: float) -> None:
        self._core.policy.arrived(now_s)
        self._core.admission.arrived(now_s)

    def _make_room(self, request: Request[In, Out]) -> None:
        """Refuse the newcomer, or the last in the queue where that has a lower priority."""
        core = self._core
        last = core.queue.last()
        error = QueueFullError(self._max_queue, core.admission.retry_after_s(request.arrived_s))
        core.count_shed(SHED_QUEUE_FULL)
        if last.key[0] <= request.key[0]:
            raise error
        core.queue.remove(last)
        fail(last, error)

    def _expire(self, request: Request[In, Out]) -> None:
        """Its deadline is now: what waits is dropped, and what runs has come too late.

        What a runner was given ahead still waits, for the batch before it.
        """
        if request.done():
            return
        core = self._core
        waited = request.queued or (request.after is not None and not request.after.done())
        core.forget(request)
        core.count_shed(SHED_EXPIRED)
        fail(request, DeadlineError(core.admission.retry_after_s(request.deadline_s) if waited else None))
