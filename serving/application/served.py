"""An endpoint with its HTTP server in the event loop of this process."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process import gc_control
from orchestray.platform.process.sockets import url_of
from orchestray.serving.application.endpoint import DRAIN_S, LiveEndpoint
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.http.settings import HttpSettings

_SWITCH_S = 0.0002
"""Seconds between thread switches of the interpreter.

A model's thread waits this long for the interpreter's lock after each operation that released it, while the event loop
is busy. With Python's 5 ms a batch of ten operations takes 50 ms longer.
"""
_LEAST_DRAIN_S = 1.0
"""Seconds for the models to end after waiting clients had their time."""


class Served:
    """An endpoint that answers at a socket of its own.

    Args:
        live: the endpoint, not started yet.
        listening: bound socket; closed at the end.
    """

    def __init__(self, live: LiveEndpoint, listening: socket.socket) -> None:
        self.live = live
        http = live.config.http
        scheme = "http" if http.tls.certificate is None else "https"
        self.url = url_of(listening, http.host, scheme=scheme)
        self._server = HttpServer(live, listening, http, shedding=live.shedding)
        self._settings = ExitStack()

    async def warnings(self) -> list[str]:
        """Return clauses about its config for its owner."""
        return self.live.warnings

    async def start(self) -> str:
        """Load the models, and answer; return the URL.

        Raises:
            OrchestrayError: a model cannot be served.
        """
        self._settings.enter_context(_short_switches())
        settle = self._settings.enter_context(gc_control.leaving_out())
        with gc_control.pause():
            await self.live.start()
        settle()
        self.live.settle = settle
        await self._server.start()
        return self.url

    async def apply(self, data: dict[str, Any], settings: HttpSettings | None = None) -> str:
        """Take over a changed config, and return the changes in a sentence; see `LiveEndpoint.apply`."""
        return await self.live.apply(data, settings=settings)

    async def replace(self, replica: str) -> str:
        """Refuse to replace a replica.

        Raises:
            OrchestrayError: always: the models run in this process.
        """
        raise OrchestrayError(f"the endpoint has no replica {replica}: with --local its models run in its own process")

    async def end(self) -> None:
        """Answer running requests, for `DRAIN_S` in all: those who end it with a signal count on that."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + DRAIN_S
        self.live.prepare_to_end()
        try:
            await self._server.stop()
            await self.live.close(drain_s=max(_LEAST_DRAIN_S, until_s - loop.time()))
        finally:
            self._settings.close()

    def end_at_once(self) -> None:
        """Stop without waiting for running requests."""
        self._server.stop_at_once()


@contextmanager
def _short_switches() -> Iterator[None]:
    """Shorten the interpreter's switch interval in the context; the process may do something else afterwards."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
