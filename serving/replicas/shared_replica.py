"""A replica that several fronts share: it runs one batch at a time, from the front whose oldest request waits longest.

Each front has a queue of its own, and reports to every replica how long its oldest request has waited. The replica
grants itself to one of them, for one batch. That front sends what is then in its queue, or gives the grant back. So no
batch is formed before it can be run, and no request waits behind an idle front. Independent of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from orchestray.serving.models.signature import Sample
from orchestray.serving.replicas import connections, wire
from orchestray.serving.replicas.in_process import BatchModel
from orchestray.serving.replicas.replica import REFUSED_WITHIN_S, BatchThread, FrontAddress, greeting

_Place = tuple[str, int]


class SharedReplicaWorker:
    """A worker that follows the fronts in a directory, until that ends or `leave` was called.

    Args:
        directory: address of the directory.
        model: model, loaded and warm.
        name: its name at the fronts.
    """

    def __init__(self, directory: FrontAddress, model: BatchModel, name: str) -> None:
        self._directory = directory
        self._greeting = {**greeting(directory), "replica": name, "signature": model.signature.to_dict()}
        self._thread = BatchThread(model)
        self._places: set[_Place] = set()
        self._following: dict[_Place, asyncio.Task[None]] = {}
        self._links: list[_Link] = []
        self._holder: _Link | None = None
        self._is_leaving = False
        self._writer: asyncio.StreamWriter | None = None
        self.ended = asyncio.Event()
        """Event that is set when the directory is gone, or all fronts have let it go."""

    @property
    def busy_s(self) -> float:
        """Seconds that the current batch has run; 0 if none runs."""
        return self._thread.busy_s

    async def serve(self) -> bool:
        """Report, and run batches.

        Returns:
            True if the fronts let it go; False if the directory is gone.
        """
        try:
            reader, self._writer = await connections.connect(self._directory.host, self._directory.port)
            await wire.send(self._writer, self._greeting)
            while True:
                header, _ = await wire.receive(reader)
                if header.get("kind") == "fronts":
                    self._follow({(str(host), int(port)) for host, port in header["fronts"]})
        except (OSError, EOFError):
            pass  # the connection has ended
        finally:
            if self._writer is not None:
                self._writer.close()
            for task in self._following.values():
                task.cancel()
            self._thread.close()
            self.ended.set()
        return self._is_leaving

    async def leave(self) -> None:
        """Ask for no more batches, and return when the current one is answered."""
        self._is_leaving = True
        if self._writer is None or self.ended.is_set():
            return
        for link in self._links:
            link.write({"kind": "goodbye"})
        if self._following:
            await asyncio.wait(self._following.values())
        self._writer.close()
        await self.ended.wait()

    def _follow(self, places: set[_Place]) -> None:
        self._places = places
        for place in places:
            task = self._following.get(place)
            if not self._is_leaving and (task is None or task.done()):
                self._following[place] = asyncio.create_task(self._serve(*place))

    async def _serve(self, host: str, port: int) -> None:
        """Run batches of one front as long as it exists; a connection that ends is opened again."""
        while not self._is_leaving and (host, port) in self._places:
            try:
                reader, writer = await connections.connect(host, port)
            except OSError:
                return  # the directory reports when it is back
            began_s = time.monotonic()
            link = _Link(writer, self)
            self._links.append(link)
            link.write({**self._greeting, "shared": True})
            try:
                await link.serve(reader)
            except (OSError, EOFError):
                if time.monotonic() - began_s < REFUSED_WITHIN_S:
                    return
            else:
                return
            finally:
                self._links.remove(link)
                writer.close()
                if self._holder is link and not link.is_running:
                    self.free(link)

    async def run(self, samples: list[Sample]) -> list[Any]:
        """Return the answers to a batch."""
        return await self._thread.run(samples)

    def free(self, link: _Link) -> None:
        """Free the replica from a front that has had its batch, or needs none."""
        if self._holder is link:
            self._holder = None
        self.deal()

    def deal(self) -> None:
        """Grant the free replica to the front whose oldest request waits longest, or tell its holder to hurry."""
        if self._is_leaving:
            return
        waiting = [link for link in self._links if link.since_s is not None]
        if self._holder is None and waiting:
            self._holder = min(waiting, key=lambda link: link.since_s or 0.0)
            self._holder.grant(hurry=len(waiting) > 1)
        elif self._holder is not None and any(link is not self._holder for link in waiting):
            self._holder.hurry()


class _Link:
    """The connection to one front."""

    def __init__(self, writer: asyncio.StreamWriter, worker: SharedReplicaWorker) -> None:
        self._writer = writer
        self._worker = worker
        self._running: asyncio.Task[None] | None = None
        self._hurried = False
        self.since_s: float | None = None
        """Time since which its oldest request waits, on this process's clock."""

    @property
    def is_running(self) -> bool:
        return self._running is not None

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Follow the front's messages until it lets go.

        Raises:
            OSError, EOFError: the connection has ended.
        """
        while True:
            header, samples = await wire.receive(reader)
            match header.get("kind"):
                case "want":
                    waited_s = header["waited_s"]
                    self.since_s = None if waited_s is None else time.monotonic() - float(waited_s)
                    self._worker.deal()
                case "give_back":
                    self.since_s = None
                    self._worker.free(self)
                case "batch":  # in a task, to go on reading: the longest waiting front may change
                    self._running = asyncio.create_task(self._run(samples))
                case "goodbye":
                    return

    def grant(self, *, hurry: bool) -> None:
        self._hurried = hurry
        self.write({"kind": "grant", "hurry": hurry})

    def hurry(self) -> None:
        """Tell the front that others wait for the replica too."""
        if not self._hurried and self._running is None:
            self._hurried = True
            self.write({"kind": "hurry"})

    def write(self, header: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            wire.write(self._writer, header)

    async def _run(self, samples: list[Sample]) -> None:
        try:
            answers = await self._worker.run(samples)
        finally:
            self._running = None
            self._worker.free(self)
        with contextlib.suppress(OSError):
            await wire.send_answers(self._writer, answers)
