"""Connections between the processes of an endpoint, which end soon where the other machine is gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping

from orchestray.platform.listening import end_where_lost

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
    end_where_lost(writer.get_extra_info("socket"), LIMITS)
    return reader, writer


async def listen(accept: Accept, host: str) -> tuple[asyncio.Server, int]:
    """Take connections like those of `connect`; returns the server, and its port, which is a free one."""

    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end_where_lost(writer.get_extra_info("socket"), LIMITS)
        await accept(reader, writer)

    server = await asyncio.start_server(watched, host, 0)
    port: int = server.sockets[0].getsockname()[1]
    return server, port


def is_secret(given: object, secret: str) -> bool:
    """Whether who greets knows the secret; strangers may send anything, also what is no text."""
    # As bytes: `compare_digest` refuses text that is not ASCII, and JSON may have halves of characters.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), secret.encode())
