"""The server's connections: what they refuse by themselves, and how they tell that a client has gone."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Self

import pytest

from orchestray.serving.config.schema import HttpSection
from orchestray.serving.http import HttpSettings, Monitor, make_app
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.routing.endpoint import Share
from orchestray.serving.routing.registry import Registry
from orchestray.serving.runtime.event_loop import FineLoop
from support.http_endpoint import ROW_SUMS, Held, version_of
from support.patience import PATIENCE_S

BODY = b'{"inputs": [[1, 2, 3], [4, 5, 6]]}'


class Served:
    """An endpoint on a socket, with a model that answers when it is let go."""

    def __init__(self, **batching: Any) -> None:
        self.held = Held()
        self.monitor = Monitor()
        self.version = version_of(ROW_SUMS, self.held, self.monitor, **batching)
        self.registry = Registry({"sums": [Share(self.version)]})
        self.registry.ready = True
        settings = HttpSettings()
        self.shedding = LoadShedder(self.monitor, settings, self.registry)
        app = make_app(self.registry, settings, monitor=self.monitor)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._server = HttpServer(app, self._socket, HttpSection(), shedding=self.shedding)

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.held.go.set()
        self._server.stop_at_once()
        await self._server.stop()
        await self.version.close()

    @property
    def connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


def request(headers: str = "", body: bytes = BODY, version: str = "1.1") -> bytes:
    return f"POST /predict HTTP/{version}\r\nHost: a\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


def run(main: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main, PATIENCE_S)

    with asyncio.Runner(loop_factory=FineLoop) as runner:
        return runner.run(limited())


def test_a_refused_request_leaves_its_connection_usable() -> None:
    async def ask() -> list[Any]:
        async with Served() as served:
            served.held.go.set()
            reader, writer = await served.connect()
            found = []
            for headers in ("", "X-Request-Timeout-Ms: 0\r\n", "X-Request-Timeout-Ms: 0\r\n", ""):
                writer.write(request(headers))
                found.append(await answer(reader))
            writer.close()
            return found

    found = run(ask())
    assert [status for status, _, _ in found] == [200, 503, 503, 200]
    assert found[1][1]["retry-after"] == "1"
    assert found[1][2]["error"].startswith("The deadline cannot be met")
    assert found[3][2] == {"outputs": [6.0, 15.0]}


def test_a_large_body_of_a_refused_request_is_passed_over() -> None:
    async def ask() -> list[int]:
        async with Served() as served:
            served.held.go.set()
            reader, writer = await served.connect()
            writer.write(request("X-Request-Timeout-Ms: 0\r\n", b" " * 1_000_000) + request())
            statuses = [(await answer(reader))[0], (await answer(reader))[0]]
            writer.close()
            return statuses

    assert run(ask()) == [503, 200]


def test_requests_in_pieces_and_in_one_piece_are_answered_in_their_order() -> None:
    """Look at a whole request without the parser; at a part, or at more than one, with it."""

    async def ask() -> list[tuple[int, str]]:
        async with Served() as served:
            served.held.go.set()
            reader, writer = await served.connect()
            found = []
            hurried = request("X-Request-Timeout-Ms: 0\r\nX-Request-Id: late\r\n")
            usual = request("X-Request-Id: usual\r\n")
            for pieces in ([hurried], [usual[:40], usual[40:]], [hurried[:-5], hurried[-5:]], [usual], [hurried]):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    for _ in range(20):
                        await asyncio.sleep(0)
                status, headers, _ = await answer(reader)
                found.append((status, headers["x-request-id"]))
            writer.write(usual + hurried + usual)
            for _ in range(3):
                status, headers, _ = await answer(reader)
                found.append((status, headers["x-request-id"]))
            writer.close()
            return found

    late, usual = (503, "late"), (200, "usual")
    assert run(ask()) == [late, usual, late, usual, late, usual, late, usual]


def test_a_connection_on_which_all_is_refused_is_closed_when_nothing_more_comes() -> None:
    async def ask() -> tuple[list[float], int]:
        async with Served() as served:
            reader, writer = await served.connect()
            for _ in range(3):
                writer.write(request("X-Request-Timeout-Ms: 0\r\n"))
                await answer(reader)
            (connection,) = served.connections
            timer = connection.timeout_keep_alive_task
            left_s = timer.when() - asyncio.get_running_loop().time()
            connection._refused_s -= 2 * connection.timeout_keep_alive  # as if that were long ago
            connection.timeout_keep_alive_handler()
            ended = await reader.read()
            writer.close()
            return [left_s], len(ended)

    (left_s,), num_bytes = run(ask())
    assert 0 < left_s <= 75
    assert num_bytes == 0


@pytest.mark.parametrize(("headers", "version"), [("Connection: close\r\n", "1.1"), ("", "1.0")])
def test_who_wants_the_connection_closed_after_a_refusal_has_it_closed(headers: str, version: str) -> None:
    async def ask() -> tuple[int, bytes]:
        async with Served() as served:
            reader, writer = await served.connect()
            writer.write(request(f"X-Request-Timeout-Ms: 0\r\n{headers}", version=version))
            status = (await answer(reader))[0]
            rest = await reader.read()
            writer.close()
            return status, rest

    assert run(ask()) == (503, b"")


def test_an_answer_ends_with_a_newline() -> None:
    async def ask() -> list[bytes]:
        async with Served() as served:
            served.held.go.set()
            bodies = []
            for headers in ("", "X-Request-Timeout-Ms: 0\r\n", "X-Request-Priority: high\r\n"):
                reader, writer = await served.connect()
                writer.write(request(headers + "Connection: close\r\n"))
                bodies.append((await reader.read()).partition(b"\r\n\r\n")[2])
                writer.close()
            return bodies

    assert all(body.endswith(b"}\n") for body in run(ask()))


def test_clients_that_leave_take_their_requests_out_of_the_queue_and_no_task_waits_for_them() -> None:
    async def ask() -> tuple[list[int], int, list[int]]:
        async with Served(max_batch_size=1) as served:
            first = await served.connect()
            first[1].write(request())
            await served.held.started.wait()
            before = len(asyncio.all_tasks())
            leaving = [await served.connect() for _ in range(20)]
            for _, writer in leaving:
                writer.write(request())
            while served.version.batcher.stats.num_queued < 20:  # noqa: ASYNC110 - the server's side of the sockets
                await asyncio.sleep(0)
            num_tasks = len(asyncio.all_tasks()) - before
            for _, writer in leaving:
                writer.transport.abort()
            while served.version.batcher.stats.num_queued:  # noqa: ASYNC110
                await asyncio.sleep(0)
            served.held.go.set()
            status = (await answer(first[0]))[0]
            first[1].close()
            return [status], num_tasks, served.held.batches

    statuses, num_tasks, batches = run(ask())
    assert statuses == [200]
    assert batches == [1]
    assert num_tasks == 20  # one a request, and none to watch its client


def test_a_client_that_ends_its_own_side_after_its_requests_gets_their_answers_and_the_end() -> None:
    async def ask() -> list[bytes]:
        async with Served() as served:
            reader, writer = await served.connect()
            writer.write(request() * 2)
            writer.write_eof()
            await served.held.started.wait()
            (connection,) = served.connections
            while not connection._has_ended:  # noqa: ASYNC110 - the server's side of the socket
                await asyncio.sleep(0)
            served.held.go.set()
            whole = await reader.read()
            writer.close()
            return whole.split(b"HTTP/1.1 ")

    nothing, *answers = run(ask())
    assert nothing == b""
    assert [each[:3] for each in answers] == [b"100", b"200", b"200"]
    assert all(each.endswith(b'{"outputs":[6.0,15.0]}\n') for each in answers[1:])


@pytest.mark.parametrize("name", ["Upgrade", "upgrade"])
def test_a_body_behind_an_offer_of_another_protocol_is_read_and_the_connection_stays_usable(name: str) -> None:
    offer = f"Connection: Upgrade, HTTP2-Settings\r\n{name}: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"

    async def ask() -> list[tuple[int, Any]]:
        async with Served() as served:
            served.held.go.set()
            reader, writer = await served.connect()
            found = []
            for whole in (request(offer), request(offer, b'{"inputs": "\r\nUpgrade: 1"}'), request()):
                writer.write(whole)
                status, _, content = await answer(reader)
                found.append((status, content.get("outputs")))
            writer.close()
            return found

    assert run(ask()) == [(200, [6.0, 15.0]), (422, None), (200, [6.0, 15.0])]


def test_many_connections_are_accepted_in_one_round_of_the_loop() -> None:
    async def ask() -> int:
        async with Served() as served:
            connections = served._server.server_state.connections
            clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(16)]
            num_rounds = 0
            while len(connections) < len(clients):
                num_rounds += 1
                await asyncio.sleep(0)
            for client in clients:
                client.close()
            return num_rounds

    assert run(ask()) < 8  # one a round would be 16
