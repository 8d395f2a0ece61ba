"""The connection of an ingress to a replica: every batch is answered, or its runner is lost; strangers get nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestray.serving.application.batch_channel import BatchConnection, BatchServer, Door
from orchestray.serving.batching import RunnerLostError
from orchestray.serving.models.errors import InputError
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas.batch_thread import BatchThread
from support.patience import PATIENCE_S


class Doubling:
    """A model that doubles, and waits with each batch until it may go on."""

    signature: Any = None

    def __init__(self) -> None:
        self.may_go_on = threading.Semaphore(0)
        self.begun: list[float] = []

    def pin_threads(self) -> None: ...

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        self.begun.append(float(samples[0]["x"][0]))
        assert self.may_go_on.acquire(timeout=PATIENCE_S)
        return [
            {"y": sample["x"] * 2} if sample["x"][0] >= 0 else InputError("x", "0 or more", "less")
            for sample in samples
        ]


class Counting(BatchThread):
    num_asked = 0

    async def run_timed(self, samples: Sequence[Sample]) -> tuple[list[Output | Exception], float]:
        self.num_asked += 1
        return await super().run_timed(samples)


class Server(BatchServer):
    def __init__(self, model: Doubling) -> None:
        self.thread = Counting(model)
        super().__init__("one", self.thread)


def batch(*numbers: float) -> list[Sample]:
    return [{"x": np.array([number], np.float32)} for number in numbers]


@asynccontextmanager
async def connected(model: Doubling) -> AsyncIterator[tuple[Server, Door, BatchConnection]]:
    server = Server(model)
    door = await server.start("127.0.0.1")
    connection = await BatchConnection.open(door)
    try:
        yield server, door, connection
    finally:
        for _ in range(10):
            model.may_go_on.release()
        await server.close()
        await connection.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.001)


async def begun(model: Doubling, count: int) -> None:
    await until(lambda: len(model.begun) >= count)


def test_batches_sent_at_once_run_in_their_order_and_each_gets_its_own_answers() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with connected(model) as (_, door, connection):
            other = await BatchConnection.open(door)
            waiting = [asyncio.create_task(connection.run(batch(number, -1))) for number in range(3)]
            await begun(model, 1)
            waiting.append(asyncio.create_task(other.run(batch(3, -1))))
            for _ in range(4):
                model.may_go_on.release()
            for number, (answers, seconds) in enumerate(await asyncio.gather(*waiting)):
                assert answers[0]["y"].tolist() == [2.0 * number]  # type: ignore[index,call-overload]
                assert str(answers[1]) == "x: wanted 0 or more, got less."
                assert seconds > 0
            assert model.begun == [0, 1, 2, 3]
            await other.close()

    asyncio.run(scenario())


def test_a_batch_that_is_cancelled_before_it_begins_is_never_run() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with connected(model) as (server, _, connection):
            first, second = (asyncio.create_task(connection.run(batch(number))) for number in (1, 2))
            await begun(model, 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            third = asyncio.create_task(connection.run(batch(3)))
            await until(lambda: server.thread.num_asked == 3)  # it has then read that the second is cancelled
            model.may_go_on.release()
            await first
            await begun(model, 2)
            model.may_go_on.release()
            await third
            assert model.begun == [1, 3]

    asyncio.run(scenario())


def test_a_replica_that_ends_answers_what_has_come_and_then_loses_its_runner() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with connected(model) as (server, _, connection):
            waiting = [asyncio.create_task(connection.run(batch(number))) for number in range(2)]
            await begun(model, 1)
            ending = asyncio.create_task(server.close())
            for _ in range(2):
                model.may_go_on.release()
            assert [len((await task)[0]) for task in waiting] == [1, 1]
            await ending
            await asyncio.wait_for(connection.closed.wait(), PATIENCE_S)
            with pytest.raises(RunnerLostError, match="replica one is gone"):
                await connection.run(batch(1))

    asyncio.run(scenario())


def test_a_connection_that_breaks_fails_the_batches_that_wait() -> None:
    async def scenario() -> None:
        async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(32))
            await reader.readexactly(32 + 8)
            writer.close()

        server = await asyncio.start_server(break_off, "127.0.0.1", 0)
        door = Door("one", "127.0.0.1", server.sockets[0].getsockname()[1], b"key")
        connection = await BatchConnection.open(door)
        with pytest.raises(RunnerLostError):
            await connection.run(batch(1))
        server.close()

    asyncio.run(scenario())


def test_who_has_not_the_key_gets_no_message_read() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with connected(model) as (_, door, connection):
            stranger = await BatchConnection.open(replace(door, key=bytes(32)))
            with pytest.raises(RunnerLostError):
                await stranger.run(batch(1))
            assert model.begun == []
            model.may_go_on.release()
            await connection.run(batch(2))
            assert model.begun == [2]

    asyncio.run(scenario())
