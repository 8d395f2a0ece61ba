"""The HTTP server: uvicorn on a socket of ours, ended by us."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestray.platform.config.serving.schema import HttpSection
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.serving.deployments.connections import guarded_by
from orchestray.serving.deployments.slow_clients import impatient
from orchestray.serving.http.shedding import Shedding

_BACKLOG = 2048
_NUM_ACCEPTED = 16
"""Connections that are accepted in one round of the event loop. libuv accepts one from each listening socket, so that
under load, when rounds are long, they would wait for seconds; one socket under several numbers is several to it."""
_KEEP_ALIVE_S = 75
"""As nginx: a client that comes again within this time need not connect again."""


class HttpServer:
    """Serves an ASGI application on a socket until it is stopped.

    Args:
        app: the application.
        shedding: says which requests do not reach it; None: all do.
        listening: bound already; closed at the end.
        http: TLS, and how long a client may take.
        drain_s: how long requests that are under way may take at the end.
    """

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        http: HttpSection,
        *,
        shedding: Shedding | None = None,
        drain_s: float = 30.0,
    ) -> None:
        self._socket = listening
        base = HttpToolsProtocol if shedding is None else guarded_by(shedding)
        config = uvicorn.Config(
            app,
            http=impatient(base, http.read_timeout_s, None if shedding is None else shedding.refusals),
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s),
            ssl_certfile=http.tls.certificate,
            ssl_keyfile=http.tls.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(f"http.tls: the certificate or its key cannot be used: {error}") from error
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on."""
        doors = [self._socket.dup() for _ in range(_NUM_ACCEPTED - 1)]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket, *doors]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise OrchestrayError("the HTTP server ended before it began; see the log")

    async def stop(self) -> None:
        """Accept nothing more, and return when what is under way is answered."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    def stop_at_once(self) -> None:
        """Do not wait for what is under way."""
        self._server.should_exit = True
        self._server.force_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's."""
        yield
