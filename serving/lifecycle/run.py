"""The life of an endpoint's command from start to end: it begins, is changed, and ends as a signal asks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from orchestray.serving.lifecycle.control import ControlServer
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState

if TYPE_CHECKING:
    from orchestray.serving.application.served import Served
    from orchestray.serving.lifecycle.on_ray import OnRay

_log = logging.getLogger("orchestray.serving")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_endpoint(
    name: str, side: Served | OnRay, state: EndpointState, on_ready: Callable[[str], None] = lambda _url: None
) -> bool:
    """Serve until a signal comes; a second signal ends it without waiting for running requests.

    Args:
        name: name of the endpoint.
        side: the place where it runs: this process, or an application of Ray Serve.
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
