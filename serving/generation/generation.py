"""What who asked for an answer holds: its tokens as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from orchestray.serving.generation.request import FinishReason, Request

MOST_UNREAD = 65_536
"""Outputs that wait for their reader, at most: a client may stop reading, and an application allow long answers."""


@dataclass(frozen=True)
class Output:
    """One step of an answer."""

    token: int | None
    """None: the rest of the text, when the answer ends with a token that is no part of it."""
    text: str
    """That is certain by now; empty while a character, or what may be a stop text, is not whole."""


class Generation:
    """An asynchronous iterator over the outputs of one request.

    Iterating raises what became of a request that was not answered: DeadlineError, BatchFunctionError,
    BatcherClosedError. A cancelled iteration cancels the request, and so does a reader that is too far behind.
    """

    def __init__(self, request: Request, forget: Callable[[Generation], None]) -> None:
        self.request = request
        self.error: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Of the deadline."""
        self.since_s = 0.0
        """When its last token came, or else the request, on the loop's clock."""
        self._forget = forget
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended: `stop` (a stop text or token), `length` (`max_tokens`), `cancelled`; None before."""
        return self.request.finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt

    @property
    def num_tokens(self) -> int:
        """Generated so far, and part of the answer."""
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
        self._outputs.put_nowait(None)  # for whoever asks again
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def text(self) -> str:
        """The whole answer."""
        return "".join([output.text async for output in self])

    def cancel(self) -> None:
        """Want no more of it: its place and its blocks are free at once. Nothing where it is over."""
        if not self.is_over:
            self.request.finish_reason = "cancelled"
            self.end()

    # -- for the engine ------------------------------------------------------------------------------------------------

    def give(self, output: Output) -> None:
        """The next output; an answer that nobody reads is cancelled before it fills the memory."""
        if self._outputs.qsize() >= MOST_UNREAD:
            self.cancel()
            return
        self._outputs.put_nowait(output)

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.error = error
            self.end()

    def end(self) -> None:
        """Let go of the request; the iteration ends after what it has been given."""
        if self.timer is not None:
            self.timer.cancel()
        self._forget(self)
        self._outputs.put_nowait(None)
