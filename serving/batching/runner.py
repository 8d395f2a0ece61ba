"""A replica as the batcher sees it: a function on batches that takes one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orchestray.serving.batching.errors import BatchFunctionError, RunTimeoutError
from orchestray.serving.batching.queue import Request

if TYPE_CHECKING:
    from orchestray.serving.batching.batcher import Batcher

In = TypeVar("In")
Out = TypeVar("Out")
RunFunction = Callable[[Sequence[In]], Awaitable[Sequence[Out | Exception]]]


class RunnerHandle(Generic[In, Out]):
    """A runner that was added to a batcher."""

    def __init__(
        self,
        batcher: Batcher[In, Out],
        run: RunFunction[In, Out],
        name: str,
        replace: Callable[[], RunFunction[In, Out]] | None,
    ) -> None:
        self.name = name
        self.run = run
        self.replace = replace
        self.removed = False
        self.batch: Sequence[Request[In, Out]] = ()
        self.started_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self._batcher = batcher

    @property
    def busy(self) -> bool:
        return self.task is not None

    async def remove(self, *, drain: bool = True) -> None:
        """Give it no more batches, and return when it has none; without `drain` its batch is run by another."""
        self._batcher.retire(self)
        task = self.task
        if task is None:
            return
        if not drain:
            task.cancel()
        await asyncio.wait({task})


async def call(run: RunFunction[In, Out], items: Sequence[In], timeout_s: float | None) -> Sequence[Out | Exception]:
    """The answers of `run`, exactly one an item; BatchFunctionError or RunTimeoutError otherwise.

    A function that hangs is cancelled and left behind: one that ignores even that holds up nobody.
    """
    try:
        if timeout_s is None:
            answers: Any = await run(items)
        else:
            task = asyncio.ensure_future(run(items))
            try:
                done, _ = await asyncio.wait({task}, timeout=timeout_s)
            finally:
                if not task.done():
                    task.cancel()
                    task.add_done_callback(_take_error)
            if not done:
                raise RunTimeoutError(f"The batch function did not return within {timeout_s:g} s and was cancelled.")
            answers = task.result()
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
    if num_answers != len(items):
        raise BatchFunctionError(
            f"The batch function must answer each request: it got {len(items)} and returned {num_answers}."
        )
    checked: Sequence[Out | Exception] = answers
    return checked


def _take_error(task: asyncio.Future[Any]) -> None:
    """Look at the error of a task that nobody waits for, so that it is not reported as overlooked."""
    if not task.cancelled():
        task.exception()
