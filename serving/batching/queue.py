"""The one queue in front of all replicas: bounded, the most urgent request first, and any request can leave at once."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

# A request without a deadline is ordered as if it had one this far away: requests with deadlines go before it, but not
# for ever.
PATIENCE_S = 60.0


class Request(asyncio.Future[Out], Generic[In, Out]):
    """A request that is the future of its answer; cancelling it removes it from the queue before `cancel` returns."""

    def __init__(
        self,
        item: In,
        *,
        loop: asyncio.AbstractEventLoop,
        number: int,
        priority: int = 0,
        deadline_s: float | None = None,
        on_cancel: Callable[[Request[In, Out]], None],
    ) -> None:
        super().__init__(loop=loop)
        self.item = item
        self.arrived_s = loop.time()
        self.deadline_s = math.inf if deadline_s is None else deadline_s
        self.key = (-priority, self.arrived_s + PATIENCE_S if deadline_s is None else deadline_s, number)
        self.queued = False
        self.expected_s = math.inf
        """Time at which an answer was expected when the request arrived; infinity: unknown."""
        self.after: asyncio.Future[Any] | None = None
        """Task of the batch that its runner runs before the batch of this request."""
        self.num_losses = 0
        """Number of runners that were lost while they had it."""
        self.timer: asyncio.TimerHandle | None = None
        self._on_cancel = on_cancel

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future; a queued request has left the queue when this returns."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._on_cancel(self)
        return cancelled


class RequestQueue(Generic[In, Out]):
    """A queue ordered by priority, deadline and arrival: higher priorities first, then earlier deadlines.

    Requests with one priority and the same allowed time are served in the order of arrival.

    It is a sorted list, and a batch is a slice of it. With at most some thousand waiting requests, insertion and
    removal are a binary search and a short move of memory.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, float, int], Request[In, Out]]] = []
        self._oldest_s: float | None = math.inf
        self._earliest_s: float | None = math.inf
        """Earliest deadline. This and `_oldest_s` are None after their request left, and computed again on demand."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request[In, Out]) -> None:
        insort(self._entries, (request.key, request))
        request.queued = True
        if self._oldest_s is not None:
            self._oldest_s = min(self._oldest_s, request.arrived_s)
        if self._earliest_s is not None:
            self._earliest_s = min(self._earliest_s, request.deadline_s)

    @property
    def oldest_s(self) -> float:
        """Arrival time of the oldest request; infinity if none waits."""
        if self._oldest_s is None:
            self._oldest_s = min((request.arrived_s for _, request in self._entries), default=math.inf)
        return self._oldest_s

    @property
    def earliest_s(self) -> float:
        """Earliest deadline; infinity if there is none."""
        if self._earliest_s is None:
            self._earliest_s = min((request.deadline_s for _, request in self._entries), default=math.inf)
        return self._earliest_s

    def _left(self, request: Request[In, Out]) -> None:
        request.queued = False
        if request.arrived_s == self._oldest_s:
            self._oldest_s = None
        if request.deadline_s == self._earliest_s:
            self._earliest_s = None

    def position(self, key: tuple[int, float, int]) -> int:
        """Return how many requests are ahead of one with this key."""
        return bisect_left(self._entries, (key,))

    def remove(self, request: Request[In, Out]) -> None:
        del self._entries[self.position(request.key)]
        self._left(request)

    def first(self, num_requests: int) -> list[Request[In, Out]]:
        """Return the most urgent requests without removing them."""
        return [request for _, request in self._entries[:num_requests]]

    def last(self) -> Request[In, Out]:
        return self._entries[-1][1]

    def pop(self, num_requests: int) -> Sequence[Request[In, Out]]:
        """Remove and return the most urgent requests."""
        taken = self.first(num_requests)
        del self._entries[:num_requests]
        for request in taken:
            self._left(request)
        return taken
