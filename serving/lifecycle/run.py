"""The life of an endpoint's command from start to end: it begins, is changed, and ends as a signal asks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, Self

from orchestray.serving.lifecycle.control import ControlServer
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState
from orchestray.serving.runtime.event_loop import FineLoop

_log = logging.getLogger("orchestray.serving")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Side(Protocol):
    """The place where an endpoint runs: this process, or an application of Ray Serve."""

    def start(self) -> Coroutine[Any, Any, str]:
        """Start; return the URL at which it answers.

        Raises:
            OrchestrayError: a model cannot be served.
        """

    def warnings(self) -> Coroutine[Any, Any, list[str]]:
        """Return clauses about its config for its owner, once it has started."""

    async def apply(self, data: dict[str, Any]) -> str:
        """Take over a changed config, as plain data; return the changes in a sentence.

        Raises:
            OrchestrayError: it cannot be served; nothing has changed.
        """

    async def replace(self, replica: str) -> str:
        """Have another replica take the place of one; return the change in a sentence.

        Args:
            replica: its name in the metrics.

        Raises:
            OrchestrayError: there is none of that name.
        """

    def end(self) -> Coroutine[Any, Any, None]:
        """Answer requests that wait or run, and end. May be called before it has started."""

    def end_at_once(self) -> None:
        """End without waiting for running requests."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for an endpoint."""
    return FineLoop()


async def run_endpoint(
    name: str, side: Side, state: EndpointState, on_ready: Callable[[str], None] = lambda _url: None
) -> bool:
    """Serve until a signal comes; a second signal ends it without waiting for running requests.

    Args:
        name: name of the endpoint.
        side: place where it runs.
        state: lock on its name, which gets its address.
        on_ready: called with the endpoint's URL when it answers.

    Returns:
        True if the signal was Ctrl-C.

    Raises:
        OrchestrayError: a model cannot be served.
    """
    with _Stop() as stop:

        async def begin() -> str:
            url = await side.start()
            stop.listen()
            for clause in await side.warnings():
                _log.warning("Warning: %s.", clause)
            return url

        async def apply(data: dict[str, Any]) -> str:
            try:
                return await side.apply(data)
            finally:
                stop.listen()

        try:
            started = asyncio.create_task(begin())
            if not await _overtaken(started, stop.asked):
                info = EndpointInfo(name, os.getpid(), started.result())
                control = ControlServer(apply, info.secret, side.replace)
                state.write(replace(info, control_port=await control.start()))
                on_ready(info.url)
                await stop.asked.wait()
                await control.close()
        finally:
            if await _overtaken(asyncio.create_task(side.end()), stop.asked_again):
                side.end_at_once()
        return stop.is_interrupt


async def _overtaken(task: asyncio.Task[Any], event: asyncio.Event) -> bool:
    """Wait for a task, unless the event happens first: then cancel it and return True."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()
        return False
    task.cancel()
    await asyncio.wait({task})
    return True


class _Stop:
    """A context in which Ctrl-C and SIGTERM are caught; without effect outside the main thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.asked_again = asyncio.Event()
        self.is_interrupt = False

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the signal handlers, again after others have replaced them, as Ray does when it starts."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._ask, number)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _ask(self, number: int) -> None:
        if self.asked.is_set():
            self.asked_again.set()
        else:
            self.is_interrupt = number == signal.SIGINT
            self.asked.set()
