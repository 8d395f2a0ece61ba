"""The HTTP server: uvicorn on a socket of ours, ended by us."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from orchestray.platform.config.serving.schema import HttpSection
from orchestray.platform.errors import ConfigError, OrchestrayError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""As nginx: a client that comes again within this time need not connect again."""


class HttpServer:
    """Serves an ASGI application on a socket until it is stopped.

    Args:
        app: the application.
        listening: bound already; closed at the end.
        http: TLS.
        drain_s: how long requests that are under way may take at the end.
    """

    def __init__(self, app: Any, listening: socket.socket, http: HttpSection, *, drain_s: float = 30.0) -> None:
        self._socket = listening
        config = uvicorn.Config(
            app,
            http="httptools",
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
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
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


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; what comes before the server is ready waits.

    Raises:
        OrchestrayError: somebody else does, or it is not allowed.
        ConfigError: there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"http.host: there is no host {host!r} ({error.strerror}); this machine is 127.0.0.1"
        ) from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)  # else another that is still loading could have bound the same port
    except OSError as error:
        listening.close()
        raise OrchestrayError(
            f"could not listen on {_in_url(host)}:{port}: {(error.strerror or str(error)).lower()}; "
            "choose another port with --port (0: any that is free)"
        ) from error
    return listening


def url_of(listening: socket.socket, http: HttpSection) -> str:
    """What a browser on this machine opens."""
    host = "127.0.0.1" if http.host in {"0.0.0.0", ""} else "::1" if http.host == "::" else http.host  # noqa: S104
    scheme = "http" if http.tls.certificate is None else "https"
    return f"{scheme}://{_in_url(host)}:{listening.getsockname()[1]}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
