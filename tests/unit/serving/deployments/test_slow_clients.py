"""Clients that send slowly hold a connection for a limited time, and those that are only far away are answered."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from orchestray.platform.config.serving.schema import HttpSection
from orchestray.serving.batching import virtual_time
from orchestray.serving.deployments.connections import guarded_by
from orchestray.serving.deployments.listening import HttpServer
from orchestray.serving.deployments.running import new_loop
from orchestray.serving.deployments.slow_clients import impatient
from orchestray.serving.http import HttpSettings, Monitor, make_app
from orchestray.serving.http.access_log import ACCESS_LOGGER
from orchestray.serving.http.shedding import Shedding
from orchestray.serving.models.endpoint import Share
from orchestray.serving.models.registry import Registry
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
    shedding = Shedding(monitor, settings, registry)
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

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(limited())


@pytest.mark.parametrize("sent", [b"P", HEAD[:30], HEAD % len(BODY), HEAD % len(BODY) + BODY[:-1]])
def test_a_request_that_does_not_come_to_its_end_is_answered_408_and_the_connection_ends(sent: bytes) -> None:
    async def main() -> bytes:
        async with served(2.0) as connect:
            reader, writer = await connect()
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    head, _, body = run(main()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"].startswith("The request did not come within 2 s.")
    assert f"content-length: {len(body)}".encode() in head


@pytest.mark.parametrize(
    ("sent", "told"), [(b"P", ("", "")), (HEAD[:30], ("", "")), (HEAD % len(BODY) + BODY[:-1], ("POST", "/predict"))]
)
def test_a_request_that_is_answered_408_is_counted_and_in_the_log_once_and_under_its_id(
    sent: bytes, told: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor = Monitor()

    async def main() -> bytes:
        async with served(2.0, monitor) as connect:
            reader, writer = await connect()
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        body = json.loads(run(main()).partition(b"\r\n\r\n")[2])
    (line,) = (json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER)
    assert (line["request_id"], line["status"]) == (body["request_id"], 408)
    assert (line["method"], line["path"], line["client"]) == (*told, "127.0.0.1")
    assert 'status="408",version=""} 1.0' in monitor.text()[0].decode()


def test_a_connection_on_which_nothing_comes_ends_without_a_word_and_one_that_was_used_stays() -> None:
    async def main() -> None:
        async with served(2.0) as connect:
            used, writer = await connect()
            for first in (True, False):
                writer.write(HEAD % len(BODY) + BODY)
                assert (await used.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                await used.readuntil(b"}\n")
                if first:
                    silent, closing = await connect()
                    assert await silent.read() == b""  # meanwhile the other has been idle for longer
                    closing.close()
            writer.close()

    run(main())


class Recorded(asyncio.Transport):
    """Keeps what is written."""

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
        """There is no one to stop."""

    def resume_reading(self) -> None:
        """As above."""


async def answer_length(_scope: Any, receive: Any, send: Any) -> None:
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{num_bytes} bytes".encode()})


@pytest.mark.parametrize(("bytes_per_s", "is_answered"), [(100_000, True), (5_000, False)])
def test_a_body_has_the_time_it_takes_while_it_comes_fast_enough(bytes_per_s: int, is_answered: bool) -> None:
    num_seconds = 100  # of virtual time

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        config = Config(answer_length, ws="none", lifespan="off", log_level="error")
        make = impatient(HttpToolsProtocol, 10.0)
        connection = make(config=config, server_state=ServerState(), app_state={}, _loop=loop)
        transport = Recorded()
        connection.connection_made(transport)
        connection.data_received(HEAD % (num_seconds * bytes_per_s))
        for _ in range(num_seconds):
            await asyncio.sleep(1)
            if not transport.closed:
                connection.data_received(b" " * bytes_per_s)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        return transport.written

    written = virtual_time.run(main())
    status = 200 if is_answered else 408
    assert written.startswith(b"HTTP/1.1 %d " % status)
    assert (b"10000000 bytes" in written) == is_answered


HURRIED = HEAD.replace(b"Host: a", b"Host: a\r\nX-Request-Timeout-Ms: 0") % len(BODY) + BODY
"""Refused by its head."""


def connected(app: Any, base: type[HttpToolsProtocol], transport: Recorded) -> HttpToolsProtocol:
    config = Config(app, ws="none", lifespan="off", log_level="error")
    loop = asyncio.get_running_loop()
    connection = impatient(base, 10.0)(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    connection.connection_made(transport)
    return connection


def refusing() -> type[HttpToolsProtocol]:
    """Connections of an endpoint with a model, in the running loop."""
    registry = Registry({"sums": [Share(version_of(ROW_SUMS, row_sums))]})
    registry.ready = True
    return guarded_by(Shedding(Monitor(), HttpSettings(), registry))


def test_a_connection_on_which_all_was_refused_so_far_stays() -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, refusing(), transport)
        for _ in range(30):  # three times as long as a client may take for a request
            connection.data_received(HURRIED)
            await asyncio.sleep(1)
        assert not transport.closed
        assert transport.written.count(b"HTTP/1.1 503 ") == 30
        connection.data_received(HEAD % len(BODY) + BODY)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        return transport.written

    assert b"%d bytes" % len(BODY) in virtual_time.run(main())


@pytest.mark.parametrize("make_base", [lambda: HttpToolsProtocol, refusing], ids=["plain", "guarded"])
def test_a_part_of_the_next_request_ends_no_connection_while_the_one_before_is_answered(
    make_base: Callable[[], type[HttpToolsProtocol]],
) -> None:
    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        connection.flow.resume_reading()  # as an application does that watches for the client's end
        await asyncio.sleep(60)
        await answer_length(scope, receive, send)

    async def main() -> bytes:
        nonlocal connection
        transport = Recorded()
        connection = connected(slowly, make_base(), transport)
        whole = HEAD % len(BODY) + BODY
        connection.data_received(whole + whole[:-5])
        await asyncio.sleep(50)
        assert transport.written == b""
        assert not transport.closed
        connection.data_received(whole[-5:])
        await asyncio.sleep(100)
        connection.connection_lost(None)
        return transport.written

    connection: Any = None
    written = virtual_time.run(main())
    assert written.count(b"HTTP/1.1 200 ") == written.count(b"%d bytes" % len(BODY)) == 2
    assert b" 408 " not in written


@pytest.mark.parametrize("first", [HEAD % len(BODY) + BODY, HURRIED], ids=["answered", "refused"])
def test_a_slow_body_of_a_refused_request_is_answered_408_on_a_kept_connection_too(first: bytes) -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, refusing(), transport)
        connection.data_received(first)
        await asyncio.sleep(1)
        transport.written = b""
        connection.data_received(HURRIED[:-5])
        await asyncio.sleep(20)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    assert virtual_time.run(main()).startswith(b"HTTP/1.1 408 ")


def test_a_slow_body_of_a_request_that_is_answered_already_is_not_answered_again() -> None:
    async def without_its_body(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> bytes:
        transport = Recorded()
        connection = connected(without_its_body, refusing(), transport)
        connection.data_received((HEAD % len(BODY) + BODY)[:-5])
        await asyncio.sleep(20)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    written = virtual_time.run(main())
    assert written.startswith(b"HTTP/1.1 401 ")
    assert b" 408 " not in written


class Full(Recorded):
    """Of a client that does not read: it holds so much, and is read from as it was told."""

    most_bytes = 10_000
    protocol: HttpToolsProtocol

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True

    def write(self, data: Any) -> None:
        before = len(self.written)
        super().write(data)
        if before <= self.most_bytes < len(self.written):
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


@pytest.mark.parametrize("sent", [HURRIED, HURRIED + HURRIED], ids=["by its bytes", "by the parser"])
def test_a_client_that_does_not_read_its_refusals_is_not_read_from_until_it_does(sent: bytes) -> None:
    async def main() -> None:
        transport = Full()
        connection = transport.protocol = connected(answer_length, refusing(), transport)
        num_sent = 0
        while transport.is_read and num_sent < 1000:
            connection.data_received(sent)
            num_sent += 1
        assert not transport.is_read
        assert len(transport.written) < 2 * Full.most_bytes
        connection.resume_writing()
        assert transport.is_read
        before = len(transport.written)
        connection.data_received(sent)
        assert len(transport.written) > before
        connection.connection_lost(None)

    virtual_time.run(main())
