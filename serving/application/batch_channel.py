"""The connection on which an ingress sends batches to a replica, and the replica answers.

A call by Serve's handle passes a router's loop, two processes' Ray threads and a loop of the replica: with two replicas
that is 5 of 6 ms of a request. Here a batch is one message each way. Ray Serve still places, checks, restarts and
scales the replicas, and the ingress asks by a handle where each one listens.

A message is its length and a pickle. Only who has the replica's key, which Ray has delivered, gets to send any.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from orchestray.serving.batching import RunnerLostError
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas.batch_thread import BatchThread

_log = logging.getLogger("orchestray.serving")

Answers: TypeAlias = tuple[list[Output | Exception], float]
"""An answer or an error for each sample, and the seconds that the model took."""
_KEY_BYTES = 32
_LENGTH_BYTES = 8
_GREETING_S = 5.0
_GONE = (OSError, EOFError)


@dataclass(frozen=True)
class Door:
    """The place where a replica takes batches."""

    replica: str
    """Id of the replica."""
    host: str
    port: int
    key: bytes


class BatchServer:
    """A server in a replica, for the ingresses that send it batches.

    Args:
        replica: id of the replica.
        thread: runs the batches.
    """

    def __init__(self, replica: str, thread: BatchThread) -> None:
        self._replica = replica
        self._thread = thread
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server: asyncio.Server
        self._reading: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> Door:
        """Listen at a free port of an address."""
        self._server = await asyncio.start_server(self._greet, host, 0)
        return Door(self._replica, host, self._server.sockets[0].getsockname()[1], self._key)

    async def close(self) -> None:
        """Take no more batches, and return when those that have come are answered."""
        self._server.close()
        reading = list(self._reading)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            async with asyncio.timeout(_GREETING_S):
                writer.write(challenge := secrets.token_bytes(_KEY_BYTES))
                proof = await reader.readexactly(_KEY_BYTES)
            if hmac.compare_digest(proof, _proof(self._key, challenge)):
                await self._answer_all(reader, writer)
        except (*_GONE, TimeoutError):
            pass
        finally:
            self._reading.discard(task)
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, samples = await _receive(reader)
                if samples is None:  # the batch is no longer wanted
                    if number in running:
                        running[number].cancel()
                    continue
                running[number] = task = asyncio.create_task(self._answer(number, samples, writer))
                task.add_done_callback(lambda _, number=number: running.pop(number))  # type: ignore[misc]
        except asyncio.CancelledError:  # the replica is ending
            await asyncio.gather(*running.values(), return_exceptions=True)
            with contextlib.suppress(OSError):
                await writer.drain()
            raise
        finally:
            for task in running.values():
                task.cancel()

    async def _answer(self, number: int, samples: list[Sample], writer: asyncio.StreamWriter) -> None:
        _send(writer, (number, await self._thread.run_timed(samples)))


class BatchConnection:
    """An ingress's connection to a replica. `open` makes one.

    Attributes:
        closed: set when the replica has ended, or its machine.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.closed = asyncio.Event()
        self._writer = writer
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answers]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, door: Door) -> Self:
        """Connect to a replica.

        Raises:
            OSError, EOFError, TimeoutError: it has ended, or cannot be reached from here.
        """
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(door.host, door.port)
            writer.write(_proof(door.key, await reader.readexactly(_KEY_BYTES)))
        return cls(reader, writer, door.replica)

    async def run(self, samples: Sequence[Sample]) -> Answers:
        """Have the replica run a batch, after those sent before.

        Raises:
            RunnerLostError: the replica ended before it had answered.
        """
        if self.closed.is_set():
            raise self._lost()
        number = next(self._numbers)
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        _send(self._writer, (number, list(samples)))
        try:
            return await future
        except asyncio.CancelledError:
            if not self.closed.is_set():
                _send(self._writer, (number, None))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the connection."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, answers = await _receive(reader)
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(answers)
        except _GONE:
            pass
        finally:
            self.closed.set()
            self._writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._lost())

    def _lost(self) -> RunnerLostError:
        return RunnerLostError(f"The replica {self._name} is gone.")


def _proof(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, "sha256")


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(_LENGTH_BYTES))
    writer.write(data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    return pickle.loads(await reader.readexactly(length))  # noqa: S301 - of one that has the key
