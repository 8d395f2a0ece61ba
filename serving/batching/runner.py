"""A replica as the batcher sees it: a function on batches that takes one at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from orchestray.serving.batching.errors import BatchFunctionError
from orchestray.serving.batching.parts import Parts
from orchestray.serving.batching.queue import Request

In = TypeVar("In")
Out = TypeVar("Out")
_MOST_AT_ONCE = 8
_NOTICED_SHARE = 0.1
"""Of a batch, how long a round of the event loop may be before a runner is given batches ahead at any time."""
RunFunction = Callable[[Sequence[In]], Awaitable[Sequence[Out | Exception]]]


class Lender(Protocol):
    """Whose a runner is that several batchers share: it grants it to one of them at a time, for one batch."""

    def want(self, oldest_s: float | None) -> None:
        """A request has waited here for so long, in seconds; None: nobody waits any more."""

    def give_back(self) -> None:
        """The grant is not used: what waited has been answered by another."""


class Flight(Generic[In, Out]):
    """A batch that a runner has.

    Args:
        batch: its requests.
        after: the task of the batch that the runner runs before it.
    """

    def __init__(self, batch: Sequence[Request[In, Out]], after: asyncio.Task[None] | None) -> None:
        self.batch = batch
        self.after = after
        self.task: asyncio.Task[None] | None = None
        self.limit: asyncio.TimerHandle | None = None
        """Fires when it is taken to hang; None: its turn has not come, or it has all the time it takes."""
        self.nearly_over: asyncio.TimerHandle | None = None
        """Fires when it is time to give the runner its next batch; None: no batch was full yet."""
        self.is_nearly_over = False
        self.taken_back = False
        """It was never begun: its runner failed before."""
        self.is_part = False
        """It is of a batch that failed."""
        self.was_cancelled = False
        """What its function raised is for that."""

    def cancel_timers(self) -> None:
        """It is over."""
        for timer in (self.limit, self.nearly_over):
            if timer is not None:
                timer.cancel()

    def take_back(self) -> None:
        """Another is to run it."""
        self.taken_back = True
        if self.task is not None:
            self.task.cancel()


class Keeper(Protocol[In, Out]):
    """Whose runners these are: a batcher."""

    def look_again(self) -> None:
        """What a runner may do has changed."""

    def retire(self, runner: RunnerHandle[In, Out]) -> None:
        """Give a runner no more batches."""


class RunnerHandle(Generic[In, Out]):
    """A runner that was added to a batcher."""

    def __init__(
        self,
        keeper: Keeper[In, Out],
        run: RunFunction[In, Out],
        name: str,
        *,
        replace: Callable[[], RunFunction[In, Out]] | None,
        lender: Lender | None = None,
        pace_s: Callable[[], float] | None = None,
    ) -> None:
        self.lender = lender
        self.granted = lender is None
        self.hurried = False
        """Another batcher waits for it: no wait for more requests is worth that."""
        self.name = name
        self.run = run
        self.replace = replace
        self.pace_s = pace_s
        """Seconds that a full batch takes it; None: it may not be called while it runs one."""
        self.num_batches = self.num_items = 0
        """Of what it has run without failing as a whole."""
        self.removed = False
        self.flights: list[Flight[In, Out]] = []
        """What it has, the one that it runs first."""
        self.started_s = 0.0
        """When that began, as far as is known here."""
        self.parts: Parts[In, Out] = Parts()
        """Of a batch that failed, what it is to run before anything else."""
        self._keeper = keeper

    @property
    def busy(self) -> bool:
        return bool(self.flights)

    @property
    def idle(self) -> bool:
        return not self.flights and self.granted

    def num_at_once(self, round_s: float) -> int:
        """Full batches that it has at once where a round of the event loop takes so long: it stands idle in none.

        It has what it runs in a round, and one that it is running when that begins. Where rounds are short it is one:
        the next is given shortly before the end.

        Args:
            round_s: seconds.
        """
        pace_s = math.inf if self.pace_s is None else self.pace_s()
        if round_s < _NOTICED_SHARE * pace_s:
            return 1
        if pace_s * (_MOST_AT_ONCE - 1) <= round_s:
            return _MOST_AT_ONCE
        return 1 + math.ceil(round_s / pace_s)

    def grant(self, *, hurry: bool) -> None:
        """By the lender: it may have a batch now, or is given back; in a `hurry` no more requests are waited for."""
        self.granted, self.hurried = True, hurry
        self._keeper.look_again()

    def hurry(self) -> None:
        """By the lender: others have come to wait for what was granted."""
        if self.granted:
            self.hurried = True
            self._keeper.look_again()

    async def remove(self, *, drain: bool = True) -> None:
        """Give it no more batches, and return when it has none; without `drain` its batch is run by another."""
        self._keeper.retire(self)
        while tasks := {flight.task for flight in self.flights if flight.task is not None}:
            if not drain:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # what a task was for has ended when its callbacks have been called


async def call(run: RunFunction[In, Out], items: Sequence[In]) -> Sequence[Out | Exception]:
    """The answers of `run`, exactly one an item; BatchFunctionError otherwise."""
    try:
        answers: Any = await run(items)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise BatchFunctionError("The batch function cancelled itself.") from error
    try:
        num_answers = len(answers)
    except TypeError as error:
        raise BatchFunctionError(
            f"The batch function must return a sequence with an answer for each request, got {type(answers).__name__}."
        ) from error
    listed: list[Out | Exception] = []
    if num_answers == len(items):
        listed = list(answers)  # here, where what that raises fails the batch
        num_answers = len(listed)  # a table, for one, has the length of its rows and lists its columns
    if num_answers != len(items):
        raise BatchFunctionError(
            f"The batch function must answer each request: it got {len(items)} and returned {num_answers}."
        )
    return listed
