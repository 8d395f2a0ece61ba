"""Requests over real connections, to servers of a few lines that answer well, badly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orchestray.loadtest.client import Client
from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.tally import Outcome
from orchestray.loadtest.worker import put

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TARGET = Target("127.0.0.1", 1, "/x", bodies=(b'{"a": 1}', b'{"a": 22}'))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return the body of one request; IncompleteReadError at the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
    return await reader.readexactly(length)


def answering(*answers: bytes, close_after: int | None = None) -> Handler:
    """Return the handler of a server that gives these answers in turns, and closes a connection after some."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        try:
            while close_after is None or number < close_after:
                await read_request(reader)
                writer.write(answers[number % len(answers)])
                await writer.drain()
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return handle


def outcomes(
    handler: Handler, num: int, *, max_connections: int = 10, timeout_s: float = 30.0, at_once: bool = False
) -> tuple[Counter[Outcome], int, int]:
    """Send `num` requests, in turn or at once; return outcomes, connections made, and requests sent again."""

    async def main() -> tuple[Counter[Outcome], int, int]:
        loop, found, made = asyncio.get_running_loop(), Counter[Outcome](), 0

        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal made
            made += 1
            await handler(reader, writer)

        server = await asyncio.start_server(counted, "127.0.0.1", 0)
        target = replace(TARGET, port=server.sockets[0].getsockname()[1])
        client = Client(target, timeout_s=timeout_s, max_connections=max_connections)

        def send() -> asyncio.Future[Outcome]:
            answer: asyncio.Future[Outcome] = loop.create_future()
            client.send(time.monotonic(), answer.set_result)
            return answer

        if at_once:
            found.update(await asyncio.gather(*(send() for _ in range(num))))
        else:
            for _ in range(num):
                found[await send()] += 1
        await client.close()
        server.close()
        return found, made, client.num_retried

    return asyncio.run(main())


def test_requests_one_after_the_other_share_a_connection() -> None:
    assert outcomes(answering(OK), 20) == (Counter({200: 20}), 1, 0)


def test_requests_at_once_have_a_connection_each_up_to_the_limit() -> None:
    assert outcomes(answering(OK), 50, max_connections=7, at_once=True) == (Counter({200: 50}), 7, 0)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\nyou\r\n0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + OK
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.mark.parametrize(("answer", "status"), [(CHUNKED, 200), (CONTINUE, 200), (NO_CONTENT, 204)])
def test_answers_of_every_framing_are_understood(answer: bytes, status: int) -> None:
    assert outcomes(answering(answer), 5) == (Counter({status: 5}), 1, 0)


def test_an_answer_without_a_length_lasts_until_the_connection_ends() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nas long as it takes"
    assert outcomes(answering(answer, close_after=1), 5) == (Counter({200: 5}), 5, 0)


def test_a_connection_that_the_server_closes_in_the_answer_is_not_used_again() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    found, made, _ = outcomes(answering(answer, close_after=1), 5)
    assert (found, made) == (Counter({200: 5}), 5)


def test_statuses_are_told_apart() -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    assert outcomes(answering(OK, OK, busy), 9)[0] == Counter({200: 6, 503: 3})


def test_bodies_are_sent_in_turns() -> None:
    bodies: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(4):
            bodies.append(await read_request(reader))
            writer.write(OK)
        writer.close()

    outcomes(handle, 4)
    assert bodies == [b'{"a": 1}', b'{"a": 22}'] * 2


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(OK[:25])
    await writer.drain()
    writer.close()


async def continued(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await writer.drain()
    writer.close()


def test_what_is_no_answer_is_named() -> None:
    assert outcomes(answering(b"220 smtp.example.org ready\r\n"), 3)[0] == Counter({"not HTTP": 3})
    assert outcomes(silent, 2, timeout_s=0.05, at_once=True)[0] == Counter({"timed out": 2})
    assert outcomes(half, 3)[0] == Counter({"connection lost": 3})
    assert outcomes(continued, 3)[0] == Counter({"connection lost": 3})


def test_a_timed_out_request_leaves_its_place_to_those_that_wait() -> None:
    found, made, _ = outcomes(silent, 6, timeout_s=0.05, max_connections=2, at_once=True)
    assert found == Counter({"timed out": 6})
    assert made <= 6


def test_a_request_times_out_by_when_it_was_due_and_is_not_sent_any_more() -> None:
    """Let a request that was due 20 s ago wait for the only connection."""
    bodies: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                bodies.append(await read_request(reader))
                writer.write(OK)
        writer.close()

    async def main() -> list[Outcome]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        target = replace(TARGET, port=server.sockets[0].getsockname()[1], bodies=(b"0", b"1", b"2"))
        client = Client(target, timeout_s=20.0, max_connections=1)
        answers = [asyncio.get_running_loop().create_future() for _ in range(3)]
        for answer, ago_s in zip(answers, (0.0, 20.0, 0.0), strict=True):
            client.send(time.monotonic() - ago_s, answer.set_result)
        found = await asyncio.gather(*answers)
        await client.close()
        server.close()
        return found

    assert asyncio.run(main()) == [200, "timed out", 200]
    assert bodies == [b"0", b"2"]


def test_a_request_that_meets_the_end_of_an_idle_connection_is_sent_again() -> None:
    """Close each connection when the second request arrives, unread, as a server closes one that had been idle."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.read(1)
        writer.transport.abort()

    found, _, num_retried = outcomes(handle, 5)
    assert found == Counter({200: 5})
    assert num_retried == 4


def test_nobody_there_is_a_refused_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        plan = Plan(Target("127.0.0.1", port, "/"), ClosedLoop(2), duration_s=1.0, warm_up_s=0.0)
        tally = asyncio.run(put(plan)).tally
    assert set(tally.errors) == {"connection refused"}
    assert tally.num_offered == tally.errors.total() >= 2


async def measured_here(handler: Handler, load: ClosedLoop | OpenLoop, **settings: float) -> tuple[Plan, int]:
    """Measure a server of this loop; return the plan and the number of requests that the server saw."""
    seen = 0

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        try:
            while True:
                await read_request(reader)
                seen += 1
                writer.write(OK)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0)
    target = Target("127.0.0.1", server.sockets[0].getsockname()[1], "/", bodies=(b"{}",))
    plan = Plan(target, load, duration_s=0.3, warm_up_s=0.0, **settings)
    measured = await put(plan, begin_s=time.monotonic() + 0.2)
    server.close()
    assert measured.tally.num_offered == measured.tally.latency.num == seen
    return plan, seen


@pytest.mark.parametrize("load", [OpenLoop(400.0), OpenLoop(400.0, 8.0), ClosedLoop(4)])
def test_every_request_that_is_counted_reached_the_server_once(load: ClosedLoop | OpenLoop) -> None:
    _, seen = asyncio.run(measured_here(answering(OK), load))
    assert seen > 0
