"""Clients that send slowly hold a connection for a limited time, and those that are only far away are answered."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from orchestray.platform.sim import event_loop
from orchestray.serving.http import Monitor
from orchestray.serving.http.access_log import ACCESS_LOGGER
from orchestray.serving.http.server.connections import GuardedConnection
from support.connections import (
    BODY,
    HEAD,
    Recorded,
    answer_length,
    answer_without_its_body,
    connected,
    run,
    served,
)

TIMEOUT_S = 0.5
"""Time that a client may take for a request: waited in full by some of these tests."""


UNFINISHED = {
    b"P": ("", ""),
    HEAD[:30]: ("", ""),
    HEAD % len(BODY): ("POST", "/predict"),
    HEAD % len(BODY) + BODY[:-1]: ("POST", "/predict"),
}
"""Bytes that are sent, with the method and the path that are known of the request."""


def test_a_request_that_does_not_come_to_its_end_is_answered_408_counted_and_in_the_log_once_and_under_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = Monitor()

    async def main() -> list[bytes]:
        async with served(TIMEOUT_S, monitor) as connect:

            async def answer_to(sent: bytes) -> bytes:
                reader, writer = await connect()
                writer.write(sent)
                answer = await reader.read()
                writer.close()
                return answer

            return await asyncio.gather(*map(answer_to, UNFINISHED))

    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        answers = run(main())
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER]
    by_id = {line["request_id"]: (line["status"], line["method"], line["path"], line["client"]) for line in lines}
    assert len(lines) == len(by_id) == len(UNFINISHED)
    for answer, told in zip(answers, UNFINISHED.values(), strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert f"content-length: {len(body)}".encode() in head
        error = json.loads(body)
        assert error["error"].startswith(f"The request did not come within {TIMEOUT_S:g} s.")
        assert by_id[error["request_id"]] == (408, *told, "127.0.0.1")
    assert f'status="408",version=""}} {len(UNFINISHED)}.0' in monitor.text()[0].decode()


def test_a_connection_on_which_nothing_comes_ends_without_a_word_and_one_that_was_used_stays() -> None:
    async def main() -> None:
        async with served(TIMEOUT_S) as connect:
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


@pytest.mark.parametrize(("bytes_per_s", "is_answered"), [(100_000, True), (5_000, False)])
def test_a_body_has_the_time_it_takes_while_it_comes_fast_enough(bytes_per_s: int, is_answered: bool) -> None:
    num_seconds = 100  # of virtual time

    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, transport)
        connection.data_received(HEAD % (num_seconds * bytes_per_s))
        for _ in range(num_seconds):
            await asyncio.sleep(1)
            if not transport.closed:
                connection.data_received(b" " * bytes_per_s)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        return transport.written

    written = event_loop.run(main())
    status = 200 if is_answered else 408
    assert written.startswith(b"HTTP/1.1 %d " % status)
    assert (b"10000000 bytes" in written) == is_answered


HURRIED = HEAD.replace(b"Host: a", b"Host: a\r\nX-Request-Timeout-Ms: 0") % len(BODY) + BODY
"""Refused by its head."""


def test_a_connection_on_which_all_was_refused_so_far_stays() -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, transport)
        for _ in range(30):  # three times as long as a client may take for a request
            connection.data_received(HURRIED)
            await asyncio.sleep(1)
        assert not transport.closed
        assert transport.written.count(b"HTTP/1.1 503 ") == 30
        connection.data_received(HEAD % len(BODY) + BODY)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        return transport.written

    assert b"%d bytes" % len(BODY) in event_loop.run(main())


def test_a_part_of_the_next_request_ends_no_connection_while_the_one_before_is_answered() -> None:
    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        connection.flow.resume_reading()  # as an application does that watches for the client's end
        await asyncio.sleep(60)
        await answer_length(scope, receive, send)

    async def main() -> bytes:
        nonlocal connection
        transport = Recorded()
        connection = connected(slowly, transport)
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
    written = event_loop.run(main())
    assert written.count(b"HTTP/1.1 200 ") == written.count(b"%d bytes" % len(BODY)) == 2
    assert b" 408 " not in written


@pytest.mark.parametrize("first", [HEAD % len(BODY) + BODY, HURRIED], ids=["answered", "refused"])
def test_a_slow_body_of_a_refused_request_is_answered_408_on_a_kept_connection_too(first: bytes) -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, transport)
        connection.data_received(first)
        await asyncio.sleep(1)
        transport.written = b""
        connection.data_received(HURRIED[:-5])
        await asyncio.sleep(20)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    assert event_loop.run(main()).startswith(b"HTTP/1.1 408 ")


def test_a_slow_body_of_a_request_that_is_answered_already_is_not_answered_again() -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_without_its_body, transport)
        connection.data_received((HEAD % len(BODY) + BODY)[:-5])
        await asyncio.sleep(20)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    written = event_loop.run(main())
    assert written.startswith(b"HTTP/1.1 401 ")
    assert b" 408 " not in written


class Full(Recorded):
    """The transport of a client that does not read: it holds `most_bytes`, and notes whether it is read from."""

    most_bytes = 10_000
    protocol: GuardedConnection

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
        connection = transport.protocol = connected(answer_length, transport)
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

    event_loop.run(main())
