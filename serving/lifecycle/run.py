"""The life of an endpoint from start to end: loading, answering, changing, draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.process import gc_control
from orchestray.platform.process.sockets import url_of
from orchestray.serving.application.endpoint import DRAIN_S, LiveEndpoint, settings_of, warning_of
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.lifecycle.control import ControlServer
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState
from orchestray.serving.runtime.event_loop import FineLoop

if TYPE_CHECKING:
    from orchestray.serving.lifecycle.fronts import ServeProxy

_log = logging.getLogger("orchestray.serving")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SWITCH_S = 0.0002
"""Seconds between thread switches of the interpreter.

A model's thread waits this long for the interpreter's lock after each operation that released it, while the event loop
is busy. With Python's 5 ms a batch of ten operations takes 50 ms longer.
"""

_LEAST_DRAIN_S = 1.0
"""Seconds for the models to end after waiting clients had their time."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for a front."""
    return FineLoop()


async def run_endpoint(
    config: ServeConfig,
    state: EndpointState,
    listening: socket.socket,
    *,
    address: str | None = None,
    on_ready: Callable[[str], None],
) -> bool:
    """Serve until a signal comes; a second signal ends it without waiting for running requests.

    Args:
        config: config of the endpoint.
        state: lock on its name, which gets its address.
        listening: bound socket.
        address: address of the Ray cluster for replicas; None: a local one.
        on_ready: called with the endpoint's URL when it answers.

    Returns:
        True if the signal was Ctrl-C.

    Raises:
        OrchestrayError: a model cannot be served.
    """
    with _short_switches(), gc_control.leaving_out() as settle, _Stop() as stop:

        async def apply(data: dict[str, Any], address: str | None) -> str:
            before = {*live.registry.versions}
            try:
                return await live.apply(data, address=address)
            finally:
                stop.listen()
                if before != {*live.registry.versions}:
                    drained = asyncio.ensure_future(live.drained())  # removed versions are garbage then
                    drained.add_done_callback(lambda done: None if done.cancelled() else settle())

        scheme = "http" if config.http.tls.certificate is None else "https"
        url = url_of(listening, config.http.host, scheme=scheme)
        live, server = _make(config, listening, address)
        if (warning := warning_of(config, settings_of(config))) is not None:
            _log.warning("Warning: %s.", warning)
        try:
            if not await _overtaken(live.start(), stop.asked):
                stop.listen()
                for clause in live.registry.uncopied:
                    _log.warning("Warning: %s.", clause)
                settle()
                await server.start()
                info = EndpointInfo(config.name, os.getpid(), url)
                control = ControlServer(apply, info.secret)
                state.write(replace(info, control_port=await control.start()))
                on_ready(info.url)
                await stop.asked.wait()
                await control.close()
        finally:
            live.prepare_to_end()
            if await _overtaken(_end(server, live), stop.asked_again):
                server.stop_at_once()
        return stop.is_interrupt


@contextmanager
def _short_switches() -> Iterator[None]:
    """Shorten the interpreter's switch interval in the context; the process may do something else afterwards."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _make(
    config: ServeConfig, listening: socket.socket, address: str | None
) -> tuple[LiveEndpoint, HttpServer | ServeProxy]:
    """Make the endpoint, and the server that answers for it."""
    if config.http.fronts == 1:
        live = LiveEndpoint(config, address=address)
        return live, HttpServer(live, listening, config.http, shedding=live.shedding)
    from orchestray.serving.lifecycle.fronts import FrontedEndpoint, ServeProxy

    port = listening.getsockname()[1]
    return FrontedEndpoint(config, port, address=address), ServeProxy(listening)


async def _end(server: HttpServer | ServeProxy, live: LiveEndpoint) -> None:
    """Answer running requests, for `DRAIN_S` in all: those who end it with a signal count on that."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + DRAIN_S
    await server.stop()
    await live.close(drain_s=max(_LEAST_DRAIN_S, until_s - loop.time()))


async def _overtaken(work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
    """Run `work`, unless the event happens first: then cancel it and return True."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
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
