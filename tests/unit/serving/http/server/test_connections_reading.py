"""Requests that cannot be read are refused as all others are, and no head takes more memory than its limit."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from orchestray.platform.sim import event_loop
from orchestray.serving.http import Monitor
from orchestray.serving.http.access_log import ACCESS_LOGGER
from orchestray.serving.http.server.connections import MOST_HEAD_BYTES
from support.connections import (
    BODY,
    HEAD,
    Recorded,
    answer_length,
    answer_to,
    answer_without_its_body,
    connected,
)

BEGUN = b"POST /predict HTTP/1.1\r\nHost: a\r\n"
WHOLE = HEAD % len(BODY) + BODY
CHUNKED = BEGUN + b"Transfer-Encoding: chunked\r\n\r\n"


def in_pieces(data: bytes, num_bytes: int) -> Iterator[bytes]:
    for begin in range(0, len(data), num_bytes):
        yield data[begin : begin + num_bytes]


def head_of(num_bytes: int, *headers: bytes) -> bytes:
    """Return the head of a request, with `num_bytes` bytes in a header."""
    return b"".join([BEGUN, *headers, b"X-Long: ", b"a" * num_bytes, b"\r\n\r\n"])


@pytest.mark.parametrize(
    "endless",
    [
        BEGUN + b"X-Long: " + b"a" * 1_000_000,
        BEGUN + b"X-" + b"a" * 1_000_000,
        b"GET /" + b"a" * 1_000_000,
        BEGUN + b"a: b\r\n" * 100_000,
        WHOLE + BEGUN + b"X-Long: " + b"a" * 1_000_000,
        CHUNKED + b"1\r\n \r\n0\r\nX-Long: " + b"a" * 1_000_000,
    ],
    ids=["value", "name", "address", "many headers", "of the second request", "behind a body"],
)
def test_a_head_without_an_end_is_answered_431_before_more_of_it_is_taken_than_its_limit(endless: bytes) -> None:
    async def main() -> tuple[int, bytes]:
        transport, num_taken = Recorded(), 0
        connection = connected(answer_length, transport)
        for piece in in_pieces(endless, 10_000):
            connection.data_received(piece)
            num_taken += len(piece)
            for _ in range(10):
                await asyncio.sleep(0)
            if transport.closed:
                break
        connection.connection_lost(None)
        return num_taken, transport.written

    num_taken, written = event_loop.run(main())
    assert num_taken < MOST_HEAD_BYTES + 2 * 10_000
    assert written.count(b"HTTP/1.1 431 ") == 1
    assert b'"error"' in written.rpartition(b"\r\n\r\n")[2]


def test_a_head_that_comes_in_one_piece_has_the_same_limit() -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, transport)
        connection.data_received(head_of(MOST_HEAD_BYTES))
        connection.connection_lost(None)
        return transport.written

    assert event_loop.run(main()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("num_bytes", [1_000, MOST_HEAD_BYTES, 262_144, 10_000_000])
def test_heads_within_the_limit_are_taken_wherever_their_bytes_are_cut(num_bytes: int) -> None:
    sent = head_of(60_000, b"Content-Length: 300000\r\n") + b" " * 300_000

    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_length, transport)
        for piece in in_pieces(sent * 4, num_bytes):
            connection.data_received(piece)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        return transport.written

    written = event_loop.run(main())
    assert written.count(b"300000 bytes") == 4
    assert b" 431 " not in written


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, ("", "")),
        (b"no http\r\n\r\n", 400, ("", "")),
        (b"GET / HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n", 400, ("", "")),
        (BEGUN + b"Content-Length: many\r\n\r\n", 400, ("", "")),
        (CHUNKED + b"zz\r\n", 400, ("POST", "/predict")),
        (BEGUN + b"X-Long: " + b"a" * (MOST_HEAD_BYTES - len(BEGUN) - 7), 431, ("", "")),
    ],
    ids=["TLS", "words", "a line", "a length", "a chunk", "a large head"],
)
def test_what_cannot_be_read_is_answered_with_json_and_is_counted_and_logged_once_under_its_id(
    sent: bytes, status: int, told: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor = Monitor()
    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        head, _, body = answer_to(sent, monitor).partition(b"\r\n\r\n")
    answer = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert {b"content-type: application/json", b"connection: close"} <= set(head.split(b"\r\n"))
    assert f"x-request-id: {answer['request_id']}".encode() in head
    assert answer["error"].endswith(".")
    (line,) = (json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER)
    assert (line["request_id"], line["status"], line["bytes"]) == (answer["request_id"], status, len(body))
    assert (line["method"], line["path"], line["client"]) == (*told, "127.0.0.1")
    assert f'status="{status}",version=""}} 1.0' in monitor.text()[0].decode()


def test_requests_before_one_that_cannot_be_read_are_answered_before_it_and_those_behind_it_not() -> None:
    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)
        await answer_length(scope, receive, send)

    async def main() -> bytes:
        transport = Recorded()
        connection = connected(slowly, transport)
        connection.data_received(WHOLE + WHOLE + b"no http\r\n\r\n")
        connection.data_received(WHOLE)
        await asyncio.sleep(5)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    written = event_loop.run(main())
    assert [part[:3] for part in written.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


@pytest.mark.parametrize("is_one_piece", [True, False])
def test_a_request_that_is_answered_already_is_not_answered_again_where_its_body_cannot_be_read(
    is_one_piece: bool,
) -> None:
    async def main() -> bytes:
        transport = Recorded()
        connection = connected(answer_without_its_body, transport)
        for piece in [CHUNKED + b"zz\r\n"] if is_one_piece else [CHUNKED, b"zz\r\n"]:
            connection.data_received(piece)
            await asyncio.sleep(1)
        assert transport.closed
        connection.connection_lost(None)
        return transport.written

    written = event_loop.run(main())
    assert written.startswith(b"HTTP/1.1 401 ")
    assert written.count(b"HTTP/1.1 ") == 1
