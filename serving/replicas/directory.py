"""The directory of an endpoint with several fronts: fronts and replicas register here, and get every change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.batching import Batcher, BatchListener
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas import connections, wire
from orchestray.serving.replicas.membership import Apply, FrontLink, Membership
from orchestray.serving.replicas.replica import FrontAddress, greeting
from orchestray.serving.routing.endpoint import ModelVersion

_log = logging.getLogger("orchestray.serving")

_GREETING_TIMEOUT_S = 10.0


class GroupVersion(ModelVersion):
    """A version in the directory, with the group name of its replicas."""

    def __init__(
        self,
        group: str,
        signature: Signature,
        batcher: Batcher[Sample, Output],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(signature, batcher, close)
        self.group = group


class Directory:
    """The registry of fronts and replicas, on the event loop of the process that started the endpoint.

    A front gets the current state as it joins, then each change; replicas get the addresses of all fronts. A process
    that loses its connection to the directory knows that the endpoint has ended.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._places: set[tuple[str, int]] = set()
        self._fronts: dict[tuple[str, int], FrontLink] = {}
        self._replicas: set[asyncio.StreamWriter] = set()
        self._first: dict[str, asyncio.Future[Signature]] = {}
        self._change: dict[str, Any] = {}
        self._problem = ""
        """Last reported problem of replicas that came later."""
        self._turn = asyncio.Lock()
        self._joined = asyncio.Condition()

    async def listen(self, host: str) -> int:
        """Start to accept fronts and replicas; return the port."""
        self._server, port = await connections.listen(self._accept, host)
        return port

    async def close(self) -> None:
        """Close all connections, because the endpoint has ended."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def version(
        self,
        group: str,
        batcher: Batcher[Sample, Output],
        close: Callable[[], Awaitable[None]],
        listener: BatchListener | None = None,
    ) -> GroupVersion:
        """Return the version of the replicas of `group`, when the first of them has reported.

        Args:
            group: name of the version's replicas.
            batcher: unused, since each front has its own.
            close: ends the replicas.
            listener: unused, like the batcher.

        Raises:
            OrchestrayError: the error of the first replica.
        """
        first = self._first[group] = asyncio.get_running_loop().create_future()
        try:
            return GroupVersion(group, await first, batcher, close)
        finally:
            del self._first[group]

    async def fronts(self, count: int) -> None:
        """Wait until `count` fronts have joined."""
        async with self._joined:
            await self._joined.wait_for(lambda: len(self._fronts) >= count)

    async def apply(self, change: dict[str, Any]) -> None:
        """Have every front take over a change, once all of them can; fronts that join later get it too.

        Raises:
            OrchestrayError: the error of a front, in which case no front has taken the change over. A lost front is not
                an error, as long as there is another.
        """
        async with self._turn:
            fronts = [*self._fronts.values()]
            errors: list[str] = []
            holds = False
            try:
                answers = await asyncio.gather(*(front.prepare(change) for front in fronts))
                errors = [error for error in answers if error is not None]
                if fronts and all(front.is_gone for front in fronts):
                    errors.append("every front was lost as it took the change over; new ones serve as before")
                holds = not errors
                if holds:
                    self._change = change
            finally:
                for front in fronts:
                    front.decide(holds=holds)
            await asyncio.gather(*(front.done() for front in fronts))
        if errors:
            raise OrchestrayError(errors[0])

    @staticmethod
    async def join(directory: FrontAddress, place: tuple[str, int], apply: Apply) -> Membership:
        """Join a directory as a front; return when the front has taken over the current state.

        Args:
            directory: address of the directory.
            place: host and port at which the front accepts replicas.
            apply: takes over a change.

        Raises:
            OSError, EOFError: the directory is gone.
            OrchestrayError: the front could not take over the current state, and has not joined.
        """
        reader, writer = await connections.connect(directory.host, directory.port)
        wire.write(writer, {**greeting(directory), "kind": "front", "place": place})
        member = Membership(reader, writer, apply)
        await member.begin()
        return member

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            header, _ = await asyncio.wait_for(wire.receive(reader, greeting=True), _GREETING_TIMEOUT_S)
            if not connections.is_secret(header.get("secret"), self.secret):
                return
            if header.get("kind") == "front":
                await self._serve_front(reader, writer, header)
            else:
                await self._serve_replica(reader, writer, header)
        except (OSError, EOFError, TimeoutError, wire.WireError):
            pass  # it is gone, or unknown
        except asyncio.CancelledError:
            if task.cancelling() == 0:
                raise
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_front(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, header: dict[str, Any]
    ) -> None:
        host, port = header["place"]
        front = FrontLink(writer)
        reading = asyncio.create_task(front.read(reader))
        self._places.add((host, port))
        self._tell_replicas()  # it is ready when they have come
        try:
            async with self._turn:  # so that no change is missed between the first one and the next
                error = await front.prepare(self._change)
                front.decide(holds=error is None)
                await front.done()
                if error is not None:
                    _log.warning("the front at %s:%s could not begin, and does not serve: %s", host, port, error)
                if front.is_gone or error is not None:
                    return
                self._fronts[host, port] = front
            async with self._joined:
                self._joined.notify_all()
            await reading
        finally:
            reading.cancel()
            self._fronts.pop((host, port), None)
            self._places.discard((host, port))
            _log.info("the front at %s:%s is gone", host, port)
            self._tell_replicas()

    async def _serve_replica(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, header: dict[str, Any]
    ) -> None:
        first = self._first.get(str(header.get("group")))
        waits = first is not None and not first.done()
        if "error" in header:
            error = OrchestrayError(str(header["error"]))
            error.exit_status = int(header.get("exit_status", 1))
            if first is not None and waits:
                first.set_exception(error)
            elif str(error) != self._problem:  # it is restarted repeatedly: report it once
                self._problem = str(error)
                _log.warning("a replica could not be started, and the others go on: %s", error)
            return
        if first is not None and waits:
            first.set_result(Signature.from_dict(header["signature"]))
        self._replicas.add(writer)
        try:
            wire.write(writer, self._fronts_message())
            await reader.read()  # it sends nothing more
        finally:
            self._replicas.discard(writer)

    def _tell_replicas(self) -> None:
        for writer in self._replicas:
            with contextlib.suppress(OSError):
                wire.write(writer, self._fronts_message())

    def _fronts_message(self) -> dict[str, Any]:
        return {"kind": "fronts", "fronts": sorted(self._places)}
