"""A thread with an event loop of its own, beside the one that Ray Serve runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from orchestray.serving.runtime.event_loop import FineLoop

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Found = TypeVar("Found")


class LoopThread:
    """A thread that runs a `FineLoop`: Serve's own loops have clocks of whole milliseconds, and other work.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = FineLoop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Run a coroutine in the thread's loop, and return its result to the calling loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def bridge(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have an ASGI application of the thread's loop answer a request of the calling loop."""
        here = asyncio.get_running_loop()

        async def received() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_coroutine(receive()), here))

        async def sent(message: Message) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_coroutine(send(message)), here))

        await self.call(_coroutine(app(scope, received, sent)))

    def end(self) -> None:
        """End the loop and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _coroutine(awaitable: Any) -> Any:
    return await awaitable
