"""Connections of the HTTP server: on a socket, with the whole endpoint behind them, or given bytes one by one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from orchestray.serving.config.schema import HttpSection
from orchestray.serving.http import HttpSettings, Monitor, make_app
from orchestray.serving.http.overload.heads import Heads
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.server.connections import GuardedConnection
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.routing.endpoint import Share
from orchestray.serving.routing.registry import Registry
from orchestray.serving.runtime.event_loop import FineLoop
from support.http_endpoint import ROW_SUMS, row_sums, version_of
from support.patience import PATIENCE_S

BODY = b'{"inputs": [[1, 2, 3], [4, 5, 6]]}'
HEAD = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
Connect = Callable[[], Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def served(read_timeout_s: float, monitor: Monitor | None = None) -> AsyncIterator[Connect]:
    version = version_of(ROW_SUMS, row_sums)
    registry, monitor, settings = Registry({"sums": [Share(version)]}), monitor or Monitor(), HttpSettings()
    registry.ready = True
    listening = socket.create_server(("127.0.0.1", 0))
    app = make_app(registry, settings, monitor=monitor)
    shedding = LoadShedder(monitor, settings, registry)
    server = HttpServer(app, listening, HttpSection(read_timeout_s=read_timeout_s), shedding=shedding)
    port = listening.getsockname()[1]
    await server.start()
    yield lambda: asyncio.open_connection("127.0.0.1", port)
    server.stop_at_once()
    await server.stop()
    await version.close()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, PATIENCE_S)

    with asyncio.Runner(loop_factory=FineLoop) as runner:
        return runner.run(limited())


def answer_to(sent: bytes, monitor: Monitor | None = None, *, read_timeout_s: float = 10.0) -> bytes:
    """Send bytes on a connection of an endpoint, and return its whole answer."""

    async def main() -> bytes:
        async with served(read_timeout_s, monitor) as connect:
            reader, writer = await connect()
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    found = run(main())
    assert isinstance(found, bytes)
    return found


class Recorded(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Do nothing: there is no peer."""

    def resume_reading(self) -> None:
        """Do nothing, likewise."""


async def answer_length(_scope: Any, receive: Any, send: Any) -> None:
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{num_bytes} bytes".encode()})


async def answer_without_its_body(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def connected(app: Any, transport: Recorded) -> GuardedConnection:
    """Return a connection of an endpoint with a model, in the running loop, whose requests an application answers."""
    registry = Registry({"sums": [Share(version_of(ROW_SUMS, row_sums))]})
    registry.ready = True
    connection = GuardedConnection(
        shedding=LoadShedder(Monitor(), HttpSettings(), registry),
        heads=Heads(),
        read_timeout_s=10.0,
        config=Config(app, ws="none", lifespan="off", log_level="error"),
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
    )
    connection.connection_made(transport)
    return connection
