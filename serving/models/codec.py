"""A task's own form of requests and answers: code that runs before and after the model, beside the batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson

from orchestray.serving.models.errors import ModelError, RequestError
from orchestray.serving.models.signature import Output, Sample, Signature

_log = logging.getLogger("orchestray.serving")


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
    """

    def __init__(
        self,
        signature: Signature,
        decode: Callable[[Any], Any] | None = None,
        encode: Callable[[Any], Any] | None = None,
        padding: Mapping[str, float] | None = None,
    ) -> None:
        self._signature, self._decode, self._encode = signature, decode, encode
        self._padding = padding or {}

    @property
    def decodes(self) -> bool:
        """True if requests are in a form of the task's own."""
        return self._decode is not None

    async def sample_of(self, value: Any, *, field: str = "inputs") -> Sample:
        """Return the sample of a request.

        Args:
            value: what the request holds for it.
            field: its name in errors.

        Raises:
            RequestError: the task refuses the value.
            InputError: it returns other inputs than the model takes.
            ModelError: it fails otherwise.
        """
        if self._decode is None:
            return self._signature.parse(value, field=field)
        return await asyncio.to_thread(self._decoded, self._decode, value, field)

    async def answer_of(self, output: Output) -> Any:
        """Return the answer to one sample, as JSON values.

        Raises:
            ModelError: the task fails, or returns something else.
        """
        if self._encode is None:
            return next(iter(output.values())) if len(output) == 1 else output
        return await asyncio.to_thread(self._encoded, self._encode, output)

    def _decoded(self, decode: Callable[[Any], Any], value: Any, field: str) -> Sample:
        try:
            inputs = _plain(decode(value))
        except ValueError as error:
            raise RequestError(f"{field}: {error}") from error
        except Exception as error:
            raise _failure(self._signature.name, "decode", error) from error
        if isinstance(inputs, tuple):
            inputs = dict(zip((spec.name for spec in self._signature.inputs), inputs, strict=False))
        return self._signature.parse(self._of_the_length(inputs), field=field)

    def _of_the_length(self, inputs: Any) -> Any:
        """Return inputs by name with the lengths that the model takes, where it takes one."""
        if not isinstance(inputs, Mapping):
            return inputs
        padded = dict(inputs)
        for spec in self._signature.inputs:
            if spec.name in self._padding and spec.name in padded and (length := spec.shape[0]) is not None:
                array = np.asarray(padded[spec.name])
                rest = np.full((max(0, length - len(array)), *array.shape[1:]), self._padding[spec.name], array.dtype)
                padded[spec.name] = np.concatenate([array, rest])
        return padded

    def _encoded(self, encode: Callable[[Any], Any], output: Output) -> Any:
        import torch

        tensors = {name: torch.tensor(array) for name, array in output.items()}
        try:
            answer = encode(next(iter(tensors.values())) if len(tensors) == 1 else tensors)
            return orjson.Fragment(orjson.dumps(answer, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY))
        except Exception as error:
            raise _failure(self._signature.name, "encode", error) from error


def _plain(inputs: Any) -> Any:
    """Return the inputs of a task with arrays instead of tensors."""
    if isinstance(inputs, Mapping):
        return {str(name): _plain(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map(_plain, inputs))
    if hasattr(inputs, "detach"):
        return inputs.detach().numpy()
    return np.asarray(inputs) if isinstance(inputs, np.generic) else inputs


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a tensor
        return value.tolist()
    raise TypeError(f"no JSON for a {type(value).__name__}")


def _failure(name: str, method: str, error: Exception) -> ModelError:
    _log.warning("%s of model %s raised on a request", method, name, exc_info=error)
    return ModelError(f"The task's {method} raised {type(error).__name__} on this request.")
