"""The caller's side of an answer: its tokens as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from orchestray.serving.generation.request import FinishReason, Request

MOST_UNREAD = 65_536
"""Largest number of unread outputs: a client may stop reading, and an application may allow long answers."""


@dataclass(frozen=True)
class Output:
    """One step of an answer."""

    token: int | None
    """Generated token; None: the rest of the text, when the answer ends with a token that is not part of it."""
    text: str
    """Text that is certain by now; empty while a character, or a possible stop text, is incomplete."""


class Generation:
    """An asynchronous iterator over the outputs of one request.

    Iterating raises the error of a request that was not answered: DeadlineError, BatchFunctionError,
    BatcherClosedError. A cancelled iteration cancels the request, and so does a reader that is too far behind.
    """

    def __init__(self, request: Request, forget: Callable[[Generation], None]) -> None:
        self.request = request
        self.error: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Timer of the deadline."""
        self.since_s = 0.0
        """Time of its last token, or else of the request, on the loop's clock."""
        self._forget = forget
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for the end: `stop` (a stop text or token), `length` (`max_tokens`), `cancelled`; None before."""
        return self.request.finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far that are part of the answer."""
        return self.request.num_generated

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.request.finish_reason is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        try:
            output = await self._outputs.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if output is not None:
            return output
        self._outputs.put_nowait(None)  # so that further calls end too
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def text(self) -> str:
        """Return the whole answer."""
        return "".join([output.text async for output in self])

    def cancel(self) -> None:
        """Cancel the request, which frees its place and its blocks at once. No effect after its end."""
        if not self.is_over:
            self.request.finish_reason = "cancelled"
            self.end()

    # -- for the engine ------------------------------------------------------------------------------------------------

    def give(self, output: Output) -> None:
        """Add the next output; an answer that is not read is cancelled before it fills the memory."""
        if self._outputs.qsize() >= MOST_UNREAD:
            self.cancel()
            return
        self._outputs.put_nowait(output)

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.error = error
            self.end()

    def end(self) -> None:
        """Release the request; the iteration ends after the outputs that it has."""
        if self.timer is not None:
            self.timer.cancel()
        self._forget(self)
        self._outputs.put_nowait(None)
