"""The connection on which an ingress sends batches to a replica, and the replica answers.

A batch is one message each way: a length, a number and a pickle. A call by a handle of Ray Serve would pass a router's
loop, two processes' Ray threads and a loop of the replica. A message is read only from a peer that has the replica's
key.

Replicas write the addresses at which they take batches to the cluster's key-value store, where an ingress reads them.
To ask replicas by a handle of Ray Serve would take it seconds where a machine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import pickle
import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from orchestray.platform.cluster import key_values
from orchestray.platform.process.sockets import end_where_lost
from orchestray.serving.batching import RunnerLostError
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas.batch_thread import BatchThread

_WRITE_EVERY_S = 1.0


@dataclass(frozen=True)
class Door:
    """The place where a replica takes batches.

    Args:
        place: result of `doors_of` for its deployment.
        replica: id of the replica.
        host, port: address at which it listens.
        key: secret that both sides of a connection have, as hexadecimal digits.
        node: id of the replica's node in the cluster; empty: a replica of an earlier version does not say.
        pid: its process there; 0: as above.
    """

    place: str
    replica: str
    host: str
    port: int
    key: str
    node: str = ""
    pid: int = 0


def doors_of(application: str, deployment: str) -> str:
    """Return the begin of the names of a deployment's doors in the store."""
    return f"orchestray-door/{application}/{deployment}/"


async def announce(door: Door) -> None:
    """Keep a door in the store, until cancelled: an ingress that could not reach it for a moment has removed it."""
    try:
        while True:
            with contextlib.suppress(Exception):  # the cluster's head is being restarted
                await asyncio.to_thread(write, door)
            await asyncio.sleep(_WRITE_EVERY_S)
    finally:
        await asyncio.to_thread(remove, door)


def write(door: Door) -> None:
    """Write a door to the store."""
    key_values.put(door.place + door.replica, asdict(door))


def remove(door: Door) -> None:
    """Remove a door from the store, if that can be reached."""
    with contextlib.suppress(Exception):  # the cluster may be gone already
        key_values.delete(door.place + door.replica)


def new_doors(place: str, known: Container[str]) -> list[Door]:
    """Return the doors of a deployment, without those of replicas that are known."""
    written = [key_values.get(key) for key in key_values.keys(place) if key.removeprefix(place) not in known]
    return [Door(**each) for each in written if each is not None]


Answers: TypeAlias = tuple[list[Output | Exception], float]
"""An answer or an error for each sample, and the seconds that the model took."""
GONE = (OSError, EOFError)
"""Errors of a connection to a peer that has ended, cannot be reached, or does not have the key."""
_KEY_BYTES = 32
_INT_BYTES = 8
_LEAVE = 2 ** (8 * _INT_BYTES) - 1
"""Number of the message that ends a replica; no batch has it."""
_CONNECT_S = 1.0
_BUFFER_BYTES = 2**20
_LIMITS = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
"""A machine that lost its power has lost its runners within 5 s."""


class BatchServer:
    """A server in a replica, for the ingresses that send it batches.

    Args:
        thread: runs the batches.
        signature: the model's, which each connection begins with.
        on_leave: called when an ingress asks the replica to end.

    Attributes:
        key: secret of those that may send any, as hexadecimal digits.
    """

    def __init__(self, thread: BatchThread, signature: Signature, on_leave: Callable[[], None] = lambda: None) -> None:
        self.key = secrets.token_hex(_KEY_BYTES)
        self._thread = thread
        self._signature = signature
        self._on_leave = on_leave
        self._server: asyncio.Server
        self._connections: set[asyncio.Task[Any]] = set()

    async def start(self, host: str) -> int:
        """Listen at an address, and return the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_BUFFER_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more batches, and return when those that have come are answered."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._connections.add(task)
        running: dict[int, asyncio.Task[None]] = {}
        try:
            async with asyncio.timeout(_CONNECT_S):
                await _prove(reader, writer, self.key, own=b"replica", other=b"ingress")
            _send(writer, 0, pickle.dumps(self._signature))
            while True:
                number, data = await _receive(reader)
                if data:
                    running[number] = batch = asyncio.create_task(self._answer(number, data, writer))
                    batch.add_done_callback(lambda _, number=number: running.pop(number))  # type: ignore[misc]
                elif number == _LEAVE:
                    self._on_leave()
                elif number in running:  # it is no longer wanted
                    running[number].cancel()
        except GONE:
            for batch in running.values():
                batch.cancel()
        except asyncio.CancelledError:
            pass  # the replica ends: it answers first
        finally:
            await asyncio.gather(*running.values(), return_exceptions=True)
            self._connections.discard(task)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)  # the answers are sent

    async def _answer(self, number: int, data: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            answers = await self._thread.run_timed(pickle.loads(data))  # noqa: S301 - of a peer that has the key
            sent = pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - a model of the user's own may answer anything
            sent = pickle.dumps(_unsendable(error))
        _send(writer, number, sent)


class BatchConnection:
    """An ingress's connection to a replica. `open` makes one, and `read` is to be awaited then.

    Attributes:
        signature: the model's.
        ended: set when the replica has ended.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: str, signature: Signature
    ) -> None:
        self.signature = signature
        self._reader = reader
        self._writer = writer
        self._replica = replica
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answers]] = {}
        self.ended = asyncio.Event()

    @classmethod
    async def open(cls, door: Door) -> Self:
        """Connect to a replica.

        Raises:
            OSError, EOFError: it has ended, or cannot be reached from here.
        """
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(door.host, door.port, limit=_BUFFER_BYTES)
            try:
                end_where_lost(writer.get_extra_info("socket"), _LIMITS)
                await _prove(reader, writer, door.key, own=b"ingress", other=b"replica")
                _, data = await _receive(reader)
                return cls(reader, writer, door.replica, pickle.loads(data))  # noqa: S301 - of a peer that has the key
            except BaseException:
                writer.close()
                raise

    async def run(self, samples: Sequence[Sample]) -> Answers:
        """Have the replica run a batch, after those sent before.

        Raises:
            RunnerLostError: the replica ended before it had answered.
            ModelError: the model's answers cannot be sent.
        """
        if self._writer.is_closing():
            raise self._lost()
        data, number = pickle.dumps(list(samples), pickle.HIGHEST_PROTOCOL), next(self._numbers)
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        _send(self._writer, number, data)
        try:
            return await future
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                _send(self._writer, number, b"")
            raise
        finally:
            del self._waiting[number]

    def send_away(self) -> None:
        """Ask the replica to end when it has answered; `read` then returns."""
        if not self._writer.is_closing():
            _send(self._writer, _LEAVE, b"")

    async def read(self) -> None:
        """Pass on the replica's answers; return when it has ended, or its machine. If cancelled, end the connection."""
        try:
            while True:
                number, data = await _receive(self._reader)
                if (future := self._waiting.get(number)) is None or future.done():
                    continue  # it is no longer wanted
                try:
                    answers = pickle.loads(data)  # noqa: S301 - of a peer that has the key
                except Exception as error:  # noqa: BLE001 - of a class that only the replica can import
                    answers = _unsendable(error)
                if isinstance(answers, ModelError):
                    future.set_exception(answers)
                else:
                    future.set_result(answers)
        except GONE:
            pass
        finally:
            self.ended.set()
            self._writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._lost())

    def _lost(self) -> RunnerLostError:
        return RunnerLostError(f"The replica {self._replica} is gone.")


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, *, own: bytes, other: bytes
) -> None:
    """Prove to the peer that this side has the key, and have it prove the same: its port may be another's by now."""
    writer.write(drawn := secrets.token_bytes(_KEY_BYTES))
    writer.write(hmac.digest(key.encode(), own + await reader.readexactly(_KEY_BYTES), "sha256"))
    proof = await reader.readexactly(_KEY_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(key.encode(), other + drawn, "sha256")):
        raise ConnectionRefusedError("the peer does not have the key")


def _unsendable(error: Exception) -> ModelError:
    return ModelError(f"The model's answers cannot be sent: {error}")


def _send(writer: asyncio.StreamWriter, number: int, data: bytes) -> None:
    writer.writelines([len(data).to_bytes(_INT_BYTES), number.to_bytes(_INT_BYTES), data])


async def _receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    length = int.from_bytes(await reader.readexactly(_INT_BYTES))
    number = int.from_bytes(await reader.readexactly(_INT_BYTES))
    return number, await reader.readexactly(length)
