"""Connections between the processes of an endpoint, which end soon after the other machine is gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping

from orchestray.platform.process.sockets import end_where_lost

_CONNECT_S = 10.0
LIMITS: Mapping[str, int] = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
"""Socket options by which the loss of a machine is noticed; not every system has all of them.

They are seconds of silence before keepalive probes, seconds between probes, number of probes, and milliseconds that
sent data may remain unacknowledged.
"""

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection that ends some ten seconds after the other machine has vanished.

    Raises:
        OSError: nothing answers there.
    """
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    end_where_lost(writer.get_extra_info("socket"), LIMITS)
    return reader, writer


async def listen(accept: Accept, host: str) -> tuple[asyncio.Server, int]:
    """Accept connections like those of `connect`; return the server, and the free port that it has."""

    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end_where_lost(writer.get_extra_info("socket"), LIMITS)
        await accept(reader, writer)

    server = await asyncio.start_server(watched, host, 0)
    port: int = server.sockets[0].getsockname()[1]
    return server, port


def is_secret(given: object, secret: str) -> bool:
    """Return True if the other side knows the secret; strangers may send anything, even values that are not text."""
    # As bytes: `compare_digest` refuses text that is not ASCII, and JSON may contain lone surrogates.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), secret.encode())
