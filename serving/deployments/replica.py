"""A replica: a model in a process of its own, which asks the front for batches. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.deployments import links, wire
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.in_process import BatchModel
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.work_thread import WorkThread

_log = logging.getLogger("orchestray.serving")

REFUSED_WITHIN_S = 0.1
"""A connection that ends so soon was refused: the front is another by now, or the version is gone."""


@dataclass(frozen=True)
class FrontAddress:
    """Where replicas report."""

    host: str
    port: int
    secret: str
    group: str
    """What the replicas of the version call themselves."""


class BatchThread:
    """Runs batches of a model, one at a time, on a thread of its own."""

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._executor = WorkThread("model", model.pin_threads)
        self._busy_since_s: float | None = None

    @property
    def busy_s(self) -> float:
        """How long the batch that runs has run, in seconds; 0 where none does."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        """The answers to a batch; where the model raises, errors: the next batch may do better."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, self._model.run, samples)
        self._busy_since_s = time.monotonic()
        try:
            return await running
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests of the batch are told
            _log.exception("a batch failed as a whole")
            failed = ModelError(f"The model raised {type(error).__name__} on this batch.")
            failed.__cause__ = error
            return [failed] * len(samples)
        finally:
            self._busy_since_s = None

    def close(self) -> None:
        """Run no more; the batch that runs is not waited for."""
        self._executor.shutdown()


class ReplicaWorker:
    """Runs the batches that a front gives it.

    Args:
        front: where it reports.
        model: loaded and warm.
        name: what it is called there.
    """

    def __init__(self, front: FrontAddress, model: BatchModel, name: str) -> None:
        self._front = front
        self._model = model
        self._name = name
        self._thread = BatchThread(model)
        self._writer: asyncio.StreamWriter | None = None
        self._is_leaving = False
        self.ended = asyncio.Event()
        """The front is gone, or has let it go."""

    @property
    def busy_s(self) -> float:
        """How long the batch that runs has run, in seconds; 0 where none does."""
        return self._thread.busy_s

    async def serve(self) -> bool:
        """Report, and run batches until the front is gone or `leave` was called.

        A connection that ends is made again: the front ends that of a replica whose batch took too long.

        Returns:
            whether it was let go; otherwise the front is gone.
        """
        try:
            while not self._is_leaving:
                try:
                    connection = await links.connect(self._front.host, self._front.port)
                except OSError:
                    break
                if not await self._serve(*connection):
                    break
        finally:
            self._thread.close()
            self.ended.set()
        return self._is_leaving

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Run batches until the connection ends; whether it was more than a refusal, and is worth making again."""
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
            pass  # it has ended
        finally:
            writer.close()
        return time.monotonic() - began_s > REFUSED_WITHIN_S

    async def leave(self) -> None:
        """Ask for no more batches, and return when the one that runs is answered."""
        self._is_leaving = True
        if self._writer is None or self.ended.is_set():
            return
        try:
            await wire.send(self._writer, {"kind": "goodbye"})
        except OSError:
            return
        await self.ended.wait()


async def report_failure(front: FrontAddress, error: OrchestrayError) -> None:
    """Tell the front that the model cannot be served, and why."""
    try:
        _, writer = await links.connect(front.host, front.port)
    except OSError:
        return
    await wire.send(writer, {**greeting(front), "error": str(error), "exit_status": error.exit_status})
    writer.close()


def greeting(front: FrontAddress) -> dict[str, str]:
    """What a replica begins with."""
    return {"secret": front.secret, "group": front.group}
