"""A thread that runs the batches of a model in a replica's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas.in_process import BatchModel
from orchestray.serving.runtime.work_thread import WorkThread

_log = logging.getLogger("orchestray.serving")


class BatchThread:
    """A thread that runs batches of a model in the order given, one at a time, or as many as a GPU has in flight."""

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._executor = WorkThread("model", model.pin_threads, num_threads=model.num_in_flight)
        self._began_s: list[float] = []
        """Times at which the current batches began."""
        self._ended_s = 0.0
        """Time at which the last batch ended."""

    @property
    def busy_s(self) -> float:
        """Seconds that the oldest current batch has run; 0 if none runs."""
        began_s = [*self._began_s]  # a snapshot, since threads change it
        return time.monotonic() - min(began_s) if began_s else 0.0

    async def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        """Return the answers to a batch; if the model raises, they are errors, and the next batch may succeed."""
        return (await self.run_timed(samples))[0]

    async def run_timed(self, samples: Sequence[Sample]) -> tuple[list[Output | Exception], float]:
        """Return the answers as `run` does, and the seconds that the model took."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, samples)
        except Exception as error:  # noqa: BLE001 - whatever it is, it answers the requests of the batch
            _log.exception("a batch failed as a whole")
            failed = ModelError(f"The model raised {type(error).__name__} on this batch.")
            failed.__cause__ = error
            return [failed] * len(samples), 0.0

    def _timed(self, samples: Sequence[Sample]) -> tuple[list[Output | Exception], float]:
        began_s = time.monotonic()
        self._began_s.append(began_s)
        try:
            answers = self._model.run(samples)
            ended_s = time.monotonic()
            seconds = ended_s - max(began_s, self._ended_s)  # before that, the device computed another one
            self._ended_s = ended_s
            return answers, seconds
        finally:
            self._began_s.remove(began_s)

    def close(self) -> None:
        """Run no more batches, without waiting for the current one."""
        self._executor.shutdown()
