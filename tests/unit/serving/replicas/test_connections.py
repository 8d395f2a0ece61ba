"""Connections between machines: both sides ask whether the other is there, on every kind of event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from orchestray.serving.replicas import connections
from orchestray.serving.runtime.event_loop import FineLoop


def limits_of(writer: asyncio.StreamWriter) -> dict[str, int]:
    connection = writer.get_extra_info("socket")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return {
        name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in connections.LIMITS
        if hasattr(socket, name)
    }


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, FineLoop])
def test_both_sides_of_a_connection_notice_a_machine_that_has_vanished(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer)

        server, port = await connections.listen(accept, "127.0.0.1")
        _, writer = await connections.connect("127.0.0.1", port)
        for side in (writer, await accepted):
            found = limits_of(side)
            assert found
            assert found == {name: connections.LIMITS[name] for name in found}
            side.close()
        server.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def test_where_nobody_listens_there_is_no_connection() -> None:
    with socket.socket() as taken:  # it is bound, and listens to nobody
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            asyncio.run(connections.connect("127.0.0.1", port))
