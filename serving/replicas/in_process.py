"""A model in the process of the HTTP front, on a thread of its own: no calls to other processes, and no Ray."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from orchestray.serving.batching import Batcher
from orchestray.serving.batching.runner import RunFunction
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.runtime.work_thread import WorkThread

_SHORT_S, _PATIENCE_S = 0.001, 0.003
_MEMORY = 32
_PACES = 5
"""Number of batches whose median pace counts: one that waited for the interpreter's lock is an outlier."""


class BatchModel(Protocol):
    """An object that runs batches, such as a `ServedModel`."""

    @property
    def signature(self) -> Signature: ...

    @property
    def num_in_flight(self) -> int:
        """Number of batches that may be run at once, each by a thread."""

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]: ...

    def pin_threads(self) -> None: ...


def in_process(model: BatchModel, batcher: Batcher[Sample, Output]) -> ModelVersion:
    """Return a version whose only runner is this process: one thread runs the batches, one at a time.

    A model on a GPU has two threads: one prepares and sends a batch while that of the other is computed.

    A thread that hangs (`run_timeout_s` of the batcher) cannot be ended: it is abandoned, and another replaces it. It
    ends with the process, which does not wait for it.
    """
    threads: list[_ModelThread] = []

    def run_on_a_new_thread() -> RunFunction[Sample, Output]:
        for old in threads:
            old.leave()
        threads[:] = [_ModelThread(model, batcher.max_batch_size)]
        return threads[0].run

    async def close() -> None:
        threads[0].leave()

    name = f"{model.signature.name}-{model.signature.version}"
    run = run_on_a_new_thread()
    batcher.add_runner(run, name=name, replace=run_on_a_new_thread, pace_s=lambda: threads[0].pace_s)
    return ModelVersion(model.signature, batcher, close)


class _ModelThread:
    """A thread that runs a model's batches, one after the other.

    A busy event loop holds the interpreter's lock, for which the model waits after every operation that released it. A
    model with batches under a millisecond spends far more time on that than on the batches. So the loop blocks during
    such batches, and goes on if one takes longer than expected. The time of a batch while the loop is busy says little
    about its time otherwise. So the shortest of the last ones counts, and blocking is tried now and then.
    """

    def __init__(self, model: BatchModel, max_batch_size: int) -> None:
        self._model = model
        self._max_batch_size = max_batch_size
        self._executor = WorkThread(f"model-{model.signature.name}", model.pin_threads, num_threads=model.num_in_flight)
        self._ended_s = 0.0
        """Time at which the last batch ended."""
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._paces_s: deque[float] = deque(maxlen=_PACES)
        self._num_run = 0
        self.pace_s = math.inf
        """Upper bound of the seconds for a full batch, from the last few: as if each request cost the same.

        A smaller batch costs more per request, and a few full ones correct that. Taken for a full batch, it would let
        in more work than can be done.
        """

    async def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        patience_s = self._patience_s(len(samples))
        future = self._executor.submit(self._timed, samples)
        if patience_s > 0:
            try:
                return future.result(patience_s)
            except TimeoutError:
                if future.done():  # it is the model's own error, or the batch has ended just now
                    return future.result()
        return await asyncio.wrap_future(future)

    def _patience_s(self, num_samples: int) -> float:
        """Return the seconds for which the event loop may block for a batch of this size."""
        self._num_run += 1
        shortest_s = math.inf
        for size, seconds in list(self._recent):  # a snapshot, since the thread adds to it
            shortest_s = min(shortest_s, seconds * max(1.0, num_samples / size))
        if shortest_s < _SHORT_S:
            return _PATIENCE_S
        return _SHORT_S if self._num_run % _MEMORY == 0 else 0.0

    def _timed(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        began_s = time.perf_counter()
        answers = self._model.run(samples)  # a batch that raises says nothing about the time of a batch
        ended_s = time.perf_counter()
        seconds = ended_s - max(began_s, self._ended_s)  # before that, the device computed another one
        self._ended_s = ended_s
        self._recent.append((len(samples), seconds))
        self._paces_s.append(seconds * max(1.0, self._max_batch_size / len(samples)))
        self.pace_s = statistics.median_low(self._paces_s)
        return answers

    def leave(self) -> None:
        """Run nothing more after the current batch."""
        self._executor.shutdown(cancel_futures=True)
