"""A model in the process of the HTTP front, on a thread of its own: no call to another process, and no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from orchestray.serving.batching import Batcher
from orchestray.serving.batching.runner import RunFunction
from orchestray.serving.models.endpoint import ModelVersion
from orchestray.serving.models.signature import Output, Sample, Signature


class BatchModel(Protocol):
    """What runs batches: a `ServedModel`, or another object like it."""

    @property
    def signature(self) -> Signature: ...

    def run(self, samples: Sequence[Sample]) -> list[Output | Exception]: ...

    def pin_threads(self) -> None: ...


def in_process(model: BatchModel, batcher: Batcher[Sample, Output]) -> ModelVersion:
    """A version whose only runner is this process: batches are run by one thread, which has them one at a time.

    A thread that hangs (`run_timeout_s` of the batcher) cannot be ended: it is left behind, and another takes over.
    """
    executors: list[ThreadPoolExecutor] = []

    def run_on_a_new_thread() -> RunFunction[Sample, Output]:
        executor = ThreadPoolExecutor(1, f"model-{model.signature.name}", initializer=model.pin_threads)
        for old in executors:
            old.shutdown(wait=False, cancel_futures=True)
        executors[:] = [executor]

        async def run(samples: Sequence[Sample]) -> list[Output | Exception]:
            return await asyncio.get_running_loop().run_in_executor(executor, model.run, samples)

        return run

    async def close() -> None:
        executors[0].shutdown(wait=False, cancel_futures=True)

    name = f"{model.signature.name}-{model.signature.version}"
    batcher.add_runner(run_on_a_new_thread(), name=name, replace=run_on_a_new_thread)
    return ModelVersion(model.signature, batcher, close)
