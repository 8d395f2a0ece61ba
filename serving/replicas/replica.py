"""A replica: a model in a process of its own, which asks the front for batches. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas import connections, wire
from orchestray.serving.replicas.in_process import BatchModel
from orchestray.serving.runtime.work_thread import WorkThread

_log = logging.getLogger("orchestray.serving")

REFUSED_WITHIN_S = 0.1
"""Seconds within which the end of a connection means a refusal: the front has been replaced, or the version is gone."""


@dataclass(frozen=True)
class FrontAddress:
    """The address to which replicas report."""

    host: str
    port: int
    secret: str
    group: str
    """Name of the group of replicas, which are those of one version."""


class BatchThread:
    """A thread that runs batches of a model, one at a time."""

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._executor = WorkThread("model", model.pin_threads)
        self._busy_since_s: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds that the current batch has run; 0 if none runs."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        """Return the answers to a batch; if the model raises, they are errors, and the next batch may succeed."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, self._model.run, samples)
        self._busy_since_s = time.monotonic()
        try:
            return await running
        except Exception as error:  # noqa: BLE001 - whatever it is, it answers the requests of the batch
            _log.exception("a batch failed as a whole")
            failed = ModelError(f"The model raised {type(error).__name__} on this batch.")
            failed.__cause__ = error
            return [failed] * len(samples)
        finally:
            self._busy_since_s = None

    def close(self) -> None:
        """Run no more batches, without waiting for the current one."""
        self._executor.shutdown()


class ReplicaWorker:
    """A worker that runs the batches that a front gives it.

    Args:
        front: address to which it reports.
        model: model, loaded and warm.
        name: its name at the front.
    """

    def __init__(self, front: FrontAddress, model: BatchModel, name: str) -> None:
        self._front = front
        self._model = model
        self._name = name
        self._thread = BatchThread(model)
        self._writer: asyncio.StreamWriter | None = None
        self._is_leaving = False
        self.ended = asyncio.Event()
        """Event that is set when the front is gone, or has let it go."""

    @property
    def busy_s(self) -> float:
        """Seconds that the current batch has run; 0 if none runs."""
        return self._thread.busy_s

    async def serve(self) -> bool:
        """Report, and run batches until the front is gone or `leave` was called.

        A connection that ends is opened again: the front ends that of a replica whose batch took too long.

        Returns:
            True if the front let it go; False if the front is gone.
        """
        try:
            while not self._is_leaving:
                try:
                    connection = await connections.connect(self._front.host, self._front.port)
                except OSError:
                    break
                if not await self._serve(*connection):
                    break
        finally:
            self._thread.close()
            self.ended.set()
        return self._is_leaving

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Run batches until the connection ends; return True if reconnecting may help, as it was not refused."""
        self._writer, began_s = writer, time.monotonic()
        try:
            signature = self._model.signature.to_dict()
            await wire.send(self._writer, {**greeting(self._front), "replica": self._name, "signature": signature})
            while True:
                header, samples = await wire.receive(reader)
                if header.get("kind") == "goodbye":
                    break
                await wire.send_answers(writer, await self._thread.run(samples))
        except (OSError, EOFError):
            pass  # the connection has ended
        finally:
            writer.close()
        return time.monotonic() - began_s > REFUSED_WITHIN_S

    async def leave(self) -> None:
        """Ask for no more batches, and return when the current one is answered."""
        self._is_leaving = True
        if self._writer is None or self.ended.is_set():
            return
        try:
            await wire.send(self._writer, {"kind": "goodbye"})
        except OSError:
            return
        await self.ended.wait()


async def report_failure(front: FrontAddress, error: OrchestrayError) -> None:
    """Report to the front that the model cannot be served, and why."""
    try:
        _, writer = await connections.connect(front.host, front.port)
    except OSError:
        return
    await wire.send(writer, {**greeting(front), "error": str(error), "exit_status": error.exit_status})
    writer.close()


def greeting(front: FrontAddress) -> dict[str, str]:
    """Return the header with which a replica introduces itself."""
    return {"secret": front.secret, "group": front.group}
