"""A task's own form of requests and answers: code that runs before and after the model, beside the batches."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orchestray.platform.task import OF_AN_ENDPOINT
from orchestray.serving.batching import DeadlineError, QueueFullError
from orchestray.serving.batching.listener import SHED_EXPIRED, SHED_QUEUE_FULL
from orchestray.serving.models.errors import InputError, ModelError, RequestError, reason_of
from orchestray.serving.models.json_values import as_numpy, json_values
from orchestray.serving.models.signature import Output, Sample, Signature
from orchestray.serving.runtime.work_thread import WorkThread

_log = logging.getLogger("orchestray.serving")
_NUM_THREADS = (os.cpu_count() or 1) + 4
"""Calls of a method at a time: it may wait for something else than the CPU."""


class Codec:
    """The optional methods `decode(request)` and `encode(outputs)` of a task, on threads of their own.

    `decode` gets what a request holds for one sample: a JSON value, or bytes. It returns the inputs of one sample,
    without a batch dimension: a tensor, an array or numbers, or a tuple or a mapping of several. Its `ValueError` is
    the client's fault, and the text of it goes to the client. `encode` gets the outputs of one sample: a tensor, or a
    mapping of several by name. It returns JSON values.

    Args:
        signature: inputs of the model.
        decode, encode: the methods; None: the task has none.
        padding: maps the task's inputs of variable length to the values with which they are padded, for a model that
            takes one length all the same, such as one that is divided over processes.
        max_queue: largest number of requests that may wait for the methods.
        on_shed: called with the reason when a request is refused, as `BatchListener.shed` is.
    """

    def __init__(
        self,
        signature: Signature,
        decode: Callable[[Any], Any] | None = None,
        encode: Callable[[Any], Any] | None = None,
        padding: Mapping[str, float] | None = None,
        max_queue: int = 1024,
        on_shed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._signature, self._decode, self._encode = signature, decode, encode
        self.decodes = decode is not None
        """True if requests are in a form of the task's own."""
        self._padding = padding or {}
        self._max_queue, self._on_shed = max_queue, on_shed
        self._num_waiting, self._took_s = 0, 1.0
        self._decoding, self._encoding = (WorkThread(name, num_threads=_NUM_THREADS) for name in OF_AN_ENDPOINT)
        for threads in (self._decoding, self._encoding):  # whose calls refer to this object as long as they last
            weakref.finalize(self, threads.shutdown)

    async def sample_of(self, value: Any, *, field: str = "inputs", deadline_s: float | None = None) -> Sample:
        """Return the sample of a request.

        Args:
            value: what the request holds for it.
            field: its name in errors.
            deadline_s: time, on the loop's clock, after which it is not needed; None: any time.

        Raises:
            RequestError: the task refuses the value.
            InputError: it returns other inputs than the model takes.
            ModelError: it fails otherwise.
            QueueFullError: too many requests wait for the task's methods.
            DeadlineError: the task is late.
        """
        if self._num_waiting >= self._max_queue:
            self._on_shed(SHED_QUEUE_FULL)
            raise QueueFullError(self._max_queue, self._took_s)
        if self._decode is None:
            return self._signature.parse(value, field=field)
        try:
            async with asyncio.timeout_at(deadline_s):
                sample: Sample = await self._in_turn(self._decoding, self._decoded, self._decode, value, field)
                return sample
        except TimeoutError:
            self._on_shed(SHED_EXPIRED)
            raise DeadlineError(self._took_s) from None

    async def answer_of(self, output: Output) -> Any:
        """Return the answer to one sample: JSON values, or arrays, of several outputs by name.

        Raises:
            ModelError: the task fails, or returns something else.
        """
        values = {name: array.item() if array.dtype == object else array for name, array in output.items()}
        if self._encode is None:
            return next(iter(values.values())) if len(values) == 1 else values
        return await self._in_turn(self._encoding, self._encoded, self._encode, values)

    async def _in_turn(self, threads: WorkThread, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns; threads of its own for each method keep answers from waiting for requests."""
        self._num_waiting, began_s = self._num_waiting + 1, time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
        finally:
            self._num_waiting, self._took_s = self._num_waiting - 1, time.monotonic() - began_s

    def _decoded(self, decode: Callable[[Any], Any], value: Any, field: str) -> Sample:
        try:
            inputs = _plain(decode(value))
        except ValueError as error:
            raise RequestError(f"{field}: {reason_of(error)}") from error
        except BaseException as error:
            raise _failure(self._signature.name, "decode", error) from error
        names = [spec.name for spec in self._signature.inputs]
        if not isinstance(inputs, Mapping):
            several = inputs if isinstance(inputs, tuple) else (inputs,)
            if len(several) > len(names):
                raise InputError(field, f"{len(names)} values at most", f"{len(several)}")
            inputs = dict(zip(names, several, strict=False))
        given: Any = self._of_the_length(inputs)
        if len(names) == 1 and [*given] == names:
            given = given[names[0]]
        return self._signature.parse(given, field=field)

    def _of_the_length(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return inputs by name with the lengths that the model takes, where it takes one."""
        padded = dict(inputs)
        for spec in self._signature.inputs:
            if spec.name in self._padding and spec.name in padded and (length := spec.shape[0]) is not None:
                array = np.asarray(padded[spec.name])
                rest = np.full((max(0, length - len(array)), *array.shape[1:]), self._padding[spec.name], array.dtype)
                padded[spec.name] = np.concatenate([array, rest])
        return padded

    def _encoded(self, encode: Callable[[Any], Any], values: dict[str, Any]) -> Any:
        import torch

        try:
            numbers = (np.ndarray, np.generic)  # numpy's rows of a column are scalars
            values = {name: torch.tensor(each) if isinstance(each, numbers) else each for name, each in values.items()}
            return json_values(encode(next(iter(values.values())) if len(values) == 1 else values))
        except BaseException as error:
            raise _failure(self._signature.name, "encode", error) from error


def _plain(inputs: Any) -> Any:
    """Return the inputs of a task with arrays instead of tensors."""
    if isinstance(inputs, Mapping):
        return {str(name): _plain(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map(_plain, inputs))
    return np.asarray(inputs) if isinstance(inputs, np.generic) else as_numpy(inputs)


def _failure(name: str, method: str, error: BaseException) -> ModelError:
    _log.warning("%s of model %s raised on a request", method, name, exc_info=error)
    return ModelError(f"The task's {method} raised {type(error).__name__} on this request.")
