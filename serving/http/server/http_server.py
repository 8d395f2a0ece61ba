"""The HTTP server: uvicorn on a given socket, stopped by its owner."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.serving.config.schema import HttpSection
from orchestray.serving.http.overload.heads import Heads
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.server.connections import GuardedConnection

_BACKLOG = 2048
_DRAIN_S = 30
"""Seconds that running requests may take at the end."""
_NUM_ACCEPTED = 16
"""Number of connections accepted in one round of the event loop.

libuv accepts one from each listening socket, so under load, when rounds are long, connections would wait for seconds.
Duplicates of one socket count as several.
"""
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept, as in nginx: clients that return within them need not connect again."""


class HttpServer(uvicorn.Server):
    """A server of an ASGI application on a socket, until it is stopped.

    Args:
        app: the application.
        listening: bound socket; closed at the end.
        http: TLS, and the time that a client may take.
        shedding: refuses requests before they reach the application.
    """

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        http: HttpSection,
        *,
        shedding: LoadShedder,
    ) -> None:
        self._socket = listening
        connection: Any = partial(
            GuardedConnection, shedding=shedding, heads=Heads(), read_timeout_s=http.read_timeout_s
        )
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,  # uvicorn's own closes the handlers of the process, on which Ray Serve's controller relies
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
            ssl_certfile=http.tls.certificate,
            ssl_keyfile=http.tls.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(f"http.tls: the certificate or its key cannot be used: {error}") from error
        super().__init__(config)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to answer requests."""
        doors = [self._socket.dup() for _ in range(_NUM_ACCEPTED - 1)]
        self._task = asyncio.create_task(self.serve(sockets=[self._socket, *doors]))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise OrchestrayError("the HTTP server ended before it began; see the log")

    async def stop(self) -> None:
        """Accept nothing more, and return when running requests are answered."""
        self.should_exit = True
        if self._task is not None:
            await self._task

    def stop_at_once(self) -> None:
        """Stop without waiting for running requests."""
        self.should_exit = True
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections; called by `serve`."""
        await super().startup(sockets)
        self._ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield
