"""The front's side of replicas in other processes: they connect, get whole batches, and may vanish at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.batching import Batcher, BatchListener, RunnerHandle, RunnerLostError
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.replicas import connections, wire
from orchestray.serving.routing.endpoint import ModelVersion

_log = logging.getLogger("orchestray.serving")

_GREETING_TIMEOUT_S = 10.0


class ReplicaPool:
    """The pool of replicas of all versions, on the front's event loop.

    A replica connects when it is loaded and warm. It is then a runner of its version's batcher until its connection
    ends. So a replica that is killed is noticed at once, and another runs its batch.

    Args:
        secret: secret of the replicas, if other fronts share them; they may then report before this front knows their
            version.
    """

    def __init__(self, secret: str | None = None) -> None:
        self.secret = secrets.token_hex(16) if secret is None else secret
        self._is_one_of_several = secret is not None
        self._groups: dict[str, _Group] = {}
        self._has_come = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str) -> int:
        """Start to accept replicas; return the port."""
        self._server, port = await connections.listen(self._serve, host)
        return port

    async def version(
        self,
        group: str,
        batcher: Batcher[Sample, Output],
        close: Callable[[], Awaitable[None]],
        listener: BatchListener | None = None,
    ) -> ModelVersion:
        """Return a version of the replicas of `group`, when the first of them has reported.

        Args:
            group: name of the version's replicas.
            batcher: gets them as runners.
            close: ends them.
            listener: listener of the batcher; also informed of replicas that are lost while they are idle.

        Raises:
            OrchestrayError: the error of the first replica.
        """
        self._groups[group] = _Group(batcher, listener or BatchListener())
        async with self._has_come:
            self._has_come.notify_all()
        try:
            signature = await self._groups[group].signature
        except BaseException:
            del self._groups[group]
            raise

        async def end() -> None:
            self._groups.pop(group, None)
            await close()

        return ModelVersion(signature, batcher, end)

    async def close(self) -> None:
        """Accept no more replicas, and disconnect those that exist."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        first: asyncio.Task[wire.Frame] | None = None
        try:
            header, _ = await asyncio.wait_for(wire.receive(reader, greeting=True), _GREETING_TIMEOUT_S)
            if not connections.is_secret(header.get("secret"), self.secret):
                return
            first = asyncio.create_task(wire.receive(reader))
            group = await self._group(str(header.get("group")), first)
            if group is None:
                return  # of a version that is gone
            if "error" in header:
                group.failed(header)
            else:
                await _Connection(reader, writer, group, header).serve(first)
        except (OSError, EOFError, TimeoutError, wire.WireError):
            pass  # it is gone, or unknown: the batch that it had has been given back
        except asyncio.CancelledError:
            if task.cancelling() == 0:
                raise
        finally:
            self._connections.discard(task)
            if first is not None:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            writer.close()

    async def _group(self, name: str, first: asyncio.Task[wire.Frame]) -> _Group | None:
        """Return the group of that name or None; in a shared pool wait until this front has it or the replica goes."""
        if name not in self._groups and self._is_one_of_several:
            coming = asyncio.create_task(self._come(name))
            try:
                await asyncio.wait({coming, first}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()
        return self._groups.get(name)

    async def _come(self, name: str) -> None:
        async with self._has_come:
            await self._has_come.wait_for(lambda: name in self._groups)


class _Group:
    """The replicas of one version."""

    def __init__(self, batcher: Batcher[Sample, Output], listener: BatchListener) -> None:
        self.batcher = batcher
        self.listener = listener
        self.signature: asyncio.Future[Signature] = asyncio.get_running_loop().create_future()
        self._reported = ""

    def failed(self, header: dict[str, Any]) -> None:
        if self.signature.done():
            self._tell(str(header["error"]))
        else:
            error = OrchestrayError(str(header["error"]))
            error.exit_status = int(header.get("exit_status", 1))
            self.signature.set_exception(error)

    def _tell(self, problem: str) -> None:
        """Log a problem of a later replica once; it is restarted repeatedly."""
        if problem != self._reported:
            self._reported = problem
            _log.warning("a replica could not be started, and the others go on: %s", problem)

    def greeted(self, header: dict[str, Any]) -> None:
        if not self.signature.done():
            self.signature.set_result(Signature.from_dict(header["signature"]))


class _Connection:
    """The connection to one replica."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, group: _Group, header: dict[str, Any]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._batcher = group.batcher
        self._listener = group.listener
        self._name = str(header.get("replica", "replica"))
        self._is_shared = bool(header.get("shared"))
        self._answer: asyncio.Future[list[Output | Exception]] | None = None
        group.greeted(header)

    async def serve(self, first: asyncio.Task[wire.Frame]) -> None:
        """Give the replica batches until it goes; `first` receives its first frame."""
        runner = self._batcher.add_runner(self._run, name=self._name, lender=self if self._is_shared else None)
        _log.info("replica %s is there", self._name)
        leaving: asyncio.Task[None] | None = None
        is_ours = False
        try:
            coming: Awaitable[wire.Frame] = first
            while True:
                header, samples = await coming
                kind = header.get("kind")
                if kind == "grant":
                    runner.grant(hurry=bool(header.get("hurry")))
                elif kind == "hurry":
                    runner.hurry()
                elif kind == "goodbye":
                    leaving = asyncio.create_task(self._release(runner))  # a task, so that its last answer is read
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(wire.answers_of(header, samples))
                coming = wire.receive(self._reader)
        except asyncio.CancelledError:
            is_ours = True
            raise
        finally:
            if leaving is not None:
                leaving.cancel()
            await self._lost(runner, expected=is_ours or leaving is not None)

    def want(self, oldest_s: float | None) -> None:
        """Ask for the shared replica on behalf of this front's oldest request (a `Lender` method)."""
        self._tell({"kind": "want", "waited_s": oldest_s})

    def give_back(self) -> None:
        """Return an unused grant of the shared replica (a `Lender` method)."""
        self._tell({"kind": "give_back"})

    def _tell(self, header: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            wire.write(self._writer, header)

    async def _release(self, runner: RunnerHandle[Sample, Output]) -> None:
        """Give the replica no more batches, and let it go when it has none."""
        await runner.remove()
        with contextlib.suppress(OSError):
            await wire.send(self._writer, {"kind": "goodbye"})

    async def _lost(self, runner: RunnerHandle[Sample, Output], *, expected: bool) -> None:
        error = RunnerLostError(f"The replica {self._name} is gone.")
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        is_reported = self._answer is not None and (self._answer.cancelled() or self._answer.exception() is error)
        if not (is_reported or expected or runner.removed):  # if it had a batch, the batcher reports the loss
            self._listener.runner_failed(self._name, error)
        with contextlib.suppress(asyncio.CancelledError):
            await runner.remove()

    async def _run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        """Send a batch to the replica and return the answers.

        A batch that is cancelled (it took too long) is the replica's last: its answer could be taken for the next
        one's.
        """
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await wire.send_batch(self._writer, samples)
            return await self._answer
        except OSError as error:
            raise RunnerLostError(f"The replica {self._name} is gone.") from error
        except asyncio.CancelledError:
            self._writer.close()
            raise
