"""Connections between the processes of an endpoint, which end soon where the other machine is gone."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

_CONNECT_S = 10.0
LIMITS: Mapping[str, int] = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
"""Seconds of silence before a machine is asked whether it is there, and between the asking; how often it is asked; and
milliseconds that what was sent may go without its acknowledgement. Not every system knows all of them."""

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that ends some ten seconds after the other machine has vanished.

    Raises:
        OSError: nobody answers there.
    """
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    _watch(writer)
    return reader, writer


async def listen(accept: Accept, host: str) -> tuple[asyncio.Server, int]:
    """Take connections like those of `connect`; returns the server, and its port, which is a free one."""

    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _watch(writer)
        await accept(reader, writer)

    server = await asyncio.start_server(watched, host, 0)
    port: int = server.sockets[0].getsockname()[1]
    return server, port


def is_secret(given: object, secret: str) -> bool:
    """Whether who greets knows the secret; strangers may send anything, also what is no text."""
    # As bytes: `compare_digest` refuses text that is not ASCII, and JSON may have halves of characters.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), secret.encode())


def _watch(writer: asyncio.StreamWriter) -> None:
    """Have the system ask whether the other machine is there.

    One that loses its power, or the network, sends no end of the connection: who only waits for it to say something
    would wait for ever, and who sends to it for a quarter of an hour.
    """
    connection: Any = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it has ended already: the next read says so
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in LIMITS.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
