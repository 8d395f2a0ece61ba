"""A replica from the batcher's point of view: a function on batches that takes one at a time.

A failed batch is run again in halves until the requests that fail are alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orchestray.serving.batching.errors import BatchFunctionError
from orchestray.serving.batching.listener import Process
from orchestray.serving.batching.queue import Request

if TYPE_CHECKING:
    from orchestray.serving.batching.batcher import Batcher

In = TypeVar("In")
Out = TypeVar("Out")
_MOST_AT_ONCE = 8
_NOTICED_SHARE = 0.1
"""Longest round of the event loop, as a fraction of a batch, at which a runner has only one batch at a time."""
RunFunction = Callable[[Sequence[In]], Awaitable[Sequence[Out | Exception]]]


class Parts(Generic[In, Out]):
    """The parts of a failed batch that a runner still has to run, each as a batch of its own.

    If all parts failed, the function is broken and no request is to blame. Failed batches are then not split, which
    would take 2 n - 1 calls for n requests, until one was answered again.
    """

    def __init__(self) -> None:
        self._waiting: list[Sequence[Request[Any, Any]]] = []
        """Parts in reverse order: the next one to run is the last."""
        self._is_vain = self._has_answered = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def split(self, batch: Sequence[Request[In, Out]], *, is_part: bool) -> bool:
        """Split a failed batch, or a part of one, into halves that run next; return False if it is not run again."""
        left = [request for request in batch if not request.done()]
        if len(batch) == 1 or not left or (self._is_vain and not is_part):
            return False
        if not is_part:
            self._has_answered = False
        middle = len(left) // 2
        self._waiting += [part for part in (left[middle:], left[:middle]) if part]
        return True

    def next(self) -> Sequence[Request[In, Out]]:
        """Return the next part, without requests that are done; may be empty."""
        return [request for request in self._waiting.pop() if not request.done()]

    def answered(self) -> None:
        """Note that a batch, or a part of one, was answered."""
        self._has_answered, self._is_vain = True, False

    def failed_alone(self) -> None:
        """Note that a part failed and is not split any further."""
        self._is_vain = not self._waiting and not self._has_answered

    def take_all(self) -> list[Request[In, Out]]:
        """Remove and return all requests that are left, for another runner."""
        found = [request for part in reversed(self._waiting) for request in part if not request.done()]
        self._waiting.clear()
        return found


class BatchInFlight(Generic[In, Out]):
    """A batch that was given to a runner.

    Args:
        batch: its requests.
        after: task of the batch that the runner runs before it.
    """

    def __init__(self, batch: Sequence[Request[In, Out]], after: asyncio.Task[None] | None) -> None:
        self.batch = batch
        self.after = after
        self.task: asyncio.Task[None] | None = None
        self.limit: asyncio.TimerHandle | None = None
        """Timer after which it is considered hung; None: its turn has not come, or it has no time limit."""
        self.nearly_over: asyncio.TimerHandle | None = None
        """Timer after which the runner gets its next batch; None: no batch was full yet."""
        self.is_nearly_over = False
        self.taken_back = False
        """True if it never began because its runner failed before."""
        self.is_part = False
        """True if it is part of a batch that failed."""
        self.was_cancelled = False
        """True if its task was cancelled, which explains the exception of its function."""

    def cancel_timers(self) -> None:
        """Cancel the timers of a batch that has ended."""
        for timer in (self.limit, self.nearly_over):
            if timer is not None:
                timer.cancel()

    def take_back(self) -> None:
        """Cancel the batch, for another runner to run it."""
        self.taken_back = True
        if self.task is not None:
            self.task.cancel()


class RunnerHandle(Generic[In, Out]):
    """A runner that was added to a batcher.

    Args:
        batcher: its batcher.
        run: the batch function.
        name: name for listeners.
        replace: returns a new batch function after a loss; None: the runner is then removed.
        pace_s: returns the seconds that it needs for a full batch; None: it takes one batch at a time.
        process: the process in which it computes; None: not known.
    """

    def __init__(
        self,
        batcher: Batcher[In, Out],
        run: RunFunction[In, Out],
        name: str,
        *,
        replace: Callable[[], RunFunction[In, Out]] | None,
        pace_s: Callable[[], float] | None = None,
        process: Process | None = None,
    ) -> None:
        self.name = name
        self.process = process
        self.run = run
        self.replace = replace
        self.pace_s = pace_s
        """Function that returns its seconds per full batch; None: it may not be called while it runs one."""
        self.num_batches = self.num_items = 0
        """Number of batches, and of requests in them, that it has run without failing as a whole."""
        self.removed = False
        self.flights: list[BatchInFlight[In, Out]] = []
        """Batches that it has, in the order in which it runs them."""
        self.started_s = 0.0
        """Time at which the first of them began, as far as the event loop knows."""
        self.parts: Parts[In, Out] = Parts()
        """Parts of a failed batch, which it runs before anything else."""
        self._batcher = batcher

    def num_at_once(self, round_s: float) -> int:
        """Return the full batches to give it at once so that it does not idle within a round of the event loop.

        That is what it can run in a round, plus one that it is running when the round begins. If rounds are short it is
        one; the next is then given shortly before the end of that.

        Args:
            round_s: seconds that a round of the event loop takes.
        """
        pace_s = math.inf if self.pace_s is None else self.pace_s()
        if round_s < _NOTICED_SHARE * pace_s:
            return 1
        if pace_s * (_MOST_AT_ONCE - 1) <= round_s:
            return _MOST_AT_ONCE
        return 1 + math.ceil(round_s / pace_s)

    async def remove(self, *, drain: bool = True) -> None:
        """Give it no more batches and return when it has none; without `drain` another runner runs its batches."""
        self._batcher.retire(self)
        while tasks := {flight.task for flight in self.flights if flight.task is not None}:
            if not drain:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # the tasks have ended fully once their callbacks have run


async def call(run: RunFunction[In, Out], items: Sequence[In]) -> Sequence[Out | Exception]:
    """Return the answers of `run`, exactly one per item.

    Args:
        run: the batch function.
        items: the batch.

    Raises:
        BatchFunctionError: the function did not answer each item, or cancelled itself.
    """
    try:
        answers: Any = await run(items)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise BatchFunctionError("The batch function cancelled itself.") from error
    # Of these, an iteration gives keys, letters or names of columns, or the answers in any order.
    is_no_sequence = isinstance(answers, Mapping | AbstractSet | str | bytes) or hasattr(answers, "columns")
    if is_no_sequence or not hasattr(answers, "__len__"):
        raise BatchFunctionError(
            f"The batch function must return a sequence with an answer for each request, got {type(answers).__name__}."
        )
    num_answers = len(answers)
    listed: list[Out | Exception] = []
    if num_answers == len(items):
        listed = list(answers)  # here, so that an exception of the iteration fails the batch
        num_answers = len(listed)  # a table, for one, has the length of its rows and lists its columns
    if num_answers != len(items):
        raise BatchFunctionError(
            f"The batch function must answer each request: it got {len(items)} and returned {num_answers}."
        )
    return listed
