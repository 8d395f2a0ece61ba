"""The connection of an ingress to a replica: every batch is answered, or its runner is lost; strangers get nothing."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestray.serving.application.batch_channel import GONE, BatchConnection, BatchServer, Door
from orchestray.serving.batching import RunnerLostError
from orchestray.serving.models.errors import InputError, ModelError
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.batch_thread import BatchThread
from support.patience import PATIENCE_S, until


class Doubling:
    """A model that doubles, and waits with each batch until it may go on."""

    num_in_flight = 1
    signature: Any = None

    def __init__(self) -> None:
        self.may_go_on = threading.Semaphore(0)
        self.begun: list[float] = []

    def pin_threads(self) -> None: ...

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        self.begun.append(float(samples[0]["x"][0]))
        assert self.may_go_on.acquire(timeout=PATIENCE_S)
        if samples[0]["x"][0] in UNSENDABLE:
            return [{"y": UNSENDABLE[samples[0]["x"][0]]}]
        return [
            {"y": sample["x"] * 2} if sample["x"][0] >= 0 else InputError("x", "0 or more", "less")
            for sample in samples
        ]


class Unreadable:
    """An object that can be pickled, and not read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


UNSENDABLE: dict[float, Any] = {100: lambda: None, 101: Unreadable()}


class Counting(BatchThread):
    num_asked = num_cancelled = 0

    async def run_timed(self, samples: Sequence[Sample]) -> tuple[list[Output | Exception], float]:
        self.num_asked += 1
        try:
            return await super().run_timed(samples)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


SIGNATURE = Signature("doubling", "1", (), (), [0.0])


def door_at(port: int, key: str) -> Door:
    return Door("orchestray-door/app/doubling/", "one", "127.0.0.1", port, key)


def batch(*numbers: float) -> list[Sample]:
    return [{"x": np.array([number], np.float32)} for number in numbers]


@asynccontextmanager
async def opened(door: Door) -> AsyncIterator[tuple[BatchConnection, asyncio.Task[None]]]:
    """Yield a connection, and the task that reads what comes on it."""
    connection = await BatchConnection.open(door)
    reading = asyncio.create_task(connection.read())
    try:
        yield connection, reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


@asynccontextmanager
async def started(model: Doubling) -> AsyncIterator[tuple[BatchServer, Counting, Door]]:
    server = BatchServer(thread := Counting(model), SIGNATURE)
    try:
        yield server, thread, door_at(await server.start("127.0.0.1"), server.key)
    finally:
        for _ in range(10):
            model.may_go_on.release()
        await server.close()


async def begun(model: Doubling, count: int) -> None:
    await until("batches that began", lambda: len(model.begun) >= count)


def test_batches_sent_at_once_run_in_their_order_and_each_gets_its_own_answers() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with started(model) as (_, _, door), opened(door) as (connection, _), opened(door) as (other, _):
            assert connection.signature == SIGNATURE
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

    asyncio.run(scenario())


@pytest.mark.parametrize("number", UNSENDABLE)
def test_an_answer_that_cannot_be_sent_is_an_error_of_its_batch_alone(number: float) -> None:
    model = Doubling()
    model.may_go_on.release(2)

    async def scenario() -> None:
        async with started(model) as (_, _, door), opened(door) as (connection, _):
            with pytest.raises(ModelError, match="answers cannot be sent"):
                await connection.run(batch(number))
            assert len((await connection.run(batch(1)))[0]) == 1

    asyncio.run(scenario())


def test_a_batch_that_is_cancelled_before_it_begins_is_never_run() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with started(model) as (_, thread, door), opened(door) as (connection, _):
            first, second = (asyncio.create_task(connection.run(batch(number))) for number in (1, 2))
            await begun(model, 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            third = asyncio.create_task(connection.run(batch(3)))
            await until("batches", lambda: thread.num_asked == 3)  # it has then read that the second is cancelled
            model.may_go_on.release()
            await first
            await begun(model, 2)
            model.may_go_on.release()
            await third
            assert model.begun == [1, 3]

    asyncio.run(scenario())


def test_batches_of_an_ingress_that_is_gone_are_not_begun() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with started(model) as (_, thread, door), opened(door) as (connection, _):
            async with opened(door) as (gone, reading):
                waiting = [asyncio.create_task(gone.run(batch(number))) for number in (1, 2)]
                await until("batches", lambda: thread.num_asked == 2 and model.begun == [1])
                reading.cancel()
                for task in waiting:
                    with pytest.raises(RunnerLostError):
                        await task
            await until("batches", lambda: thread.num_cancelled == 2)
            model.may_go_on.release()
            model.may_go_on.release()
            await connection.run(batch(3))
            assert model.begun == [1, 3]

    asyncio.run(scenario())


def test_a_replica_that_ends_answers_what_has_come_and_then_loses_its_runner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Doubling()

    async def scenario() -> None:
        async with started(model) as (server, thread, door), opened(door) as (connection, reading):
            waiting = [asyncio.create_task(connection.run(batch(number))) for number in range(2)]
            await until("batches", lambda: thread.num_asked == 2)
            ending = asyncio.create_task(server.close())
            for _ in range(2):
                model.may_go_on.release()
            assert [len((await task)[0]) for task in waiting] == [1, 1]
            await ending
            await asyncio.wait_for(reading, PATIENCE_S)
            with pytest.raises(RunnerLostError, match="replica one is gone"):
                await connection.run(batch(1))
            with pytest.raises(ConnectionRefusedError):
                await BatchConnection.open(door)

    asyncio.run(scenario())
    assert caplog.messages == []


def test_a_replica_that_is_sent_away_answers_what_it_has_and_takes_no_more() -> None:
    model = Doubling()

    async def scenario() -> None:
        ending: list[asyncio.Future[None]] = []
        server = BatchServer(
            Counting(model), SIGNATURE, on_leave=lambda: ending.append(asyncio.ensure_future(server.close()))
        )
        door = door_at(await server.start("127.0.0.1"), server.key)
        async with opened(door) as (connection, _):
            waiting = asyncio.create_task(connection.run(batch(1)))
            await begun(model, 1)
            connection.send_away()
            await until("the replica has read it", lambda: bool(ending))
            assert not connection.ended.is_set()
            model.may_go_on.release()
            assert len((await waiting)[0]) == 1
            await asyncio.wait_for(connection.ended.wait(), PATIENCE_S)
            with pytest.raises(GONE):
                await BatchConnection.open(door)
        await asyncio.gather(*ending)

    asyncio.run(scenario())


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Yield the port of one who sends each part after 32 bytes, and what it reads until the end."""
    read: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            read.append(await reader.readexactly(32))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], read
    server.close()


class Pickled:
    """An object that says when it is read from a pickle."""

    num_read = 0

    def __reduce__(self) -> Any:
        return Pickled.count, ()

    @staticmethod
    def count() -> None:
        Pickled.num_read += 1


def message() -> bytes:
    data = pickle.dumps(Pickled())
    return len(data).to_bytes(8) + bytes(8) + data


def test_who_has_taken_the_port_of_a_replica_and_has_not_the_key_gets_no_message_read() -> None:
    async def scenario() -> None:
        async with answering(bytes(32), bytes(32) + message()) as (port, _):
            with pytest.raises(GONE):
                await BatchConnection.open(door_at(port, "key"))

    asyncio.run(scenario())
    assert Pickled.num_read == 0


def test_who_does_not_know_the_key_of_a_replica_gets_no_message_read() -> None:
    model = Doubling()

    async def scenario() -> None:
        async with started(model) as (_, _, door), opened(door) as (connection, _):
            with pytest.raises(GONE):
                await BatchConnection.open(replace(door, key="00" * 32))
            reader, writer = await asyncio.open_connection(door.host, door.port)
            drawn = await reader.readexactly(32)
            writer.write(drawn)  # what it has said itself proves nothing
            writer.write(await reader.readexactly(32) + message())
            assert await reader.read() == b""
            writer.close()
            model.may_go_on.release()
            await connection.run(batch(2))
            assert model.begun == [2]

    asyncio.run(scenario())
    assert Pickled.num_read == 0
