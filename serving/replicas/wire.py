"""Frames that carry batches between processes: a JSON header and raw tensors. No pickle, one copy each way."""

from __future__ import annotations

import asyncio
import json
import struct
import traceback
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample, Tensors

_SIZES = struct.Struct("!IQ")
_MAX_HEADER_BYTES = 2**24
_MAX_GREETING_BYTES = 2**20
_MOST_FRAMES, _MOST_CHARACTERS = 10, 8000
"""Limits of the traceback of an error."""

Frame: TypeAlias = tuple[dict[str, Any], list[Tensors]]
"""Type of a frame: a header and samples."""


class WireError(OrchestrayError):
    """The error that the other side sent something that is not a frame."""


class ReplicaTraceback(Exception):  # noqa: N818 - it stands for an error
    """The text of an exception in the replica's process: the cause, for the log of the process with the request."""


async def send(writer: asyncio.StreamWriter, header: dict[str, Any], samples: Sequence[Tensors] = ()) -> None:
    """Send a frame.

    Args:
        writer: connection to the other side.
        header: JSON values.
        samples: arrays by name. Consecutive samples with the same names, types and shapes (usually all) are sent as one
            array. Shapes differ if a model's outputs depend on the batch and the batch had to be halved.
    """
    write(writer, header, samples)
    await writer.drain()


def write(writer: asyncio.StreamWriter, header: dict[str, Any], samples: Sequence[Tensors] = ()) -> None:
    """Write a frame without waiting, for a few bytes; frames arrive in the order of writing.

    Raises:
        OSError: the connection has ended.
    """
    if writer.is_closing():  # uvloop's transports would raise a RuntimeError
        raise ConnectionResetError("the connection has ended")
    stacks = [_stacked([*alike]) for _, alike in groupby(samples, _form)]
    tensors = [[[name, str(array.dtype), array.shape] for name, array in stack.items()] for stack in stacks]
    arrays = [array for stack in stacks for array in stack.values()]
    text = json.dumps({**header, "tensors": tensors}).encode()
    writer.write(_SIZES.pack(len(text), sum(array.nbytes for array in arrays)) + text)
    for array in arrays:
        writer.write(array.reshape(-1).view(np.uint8).data)


def _form(sample: Tensors) -> list[Any]:
    return [(name, array.dtype, array.shape) for name, array in sample.items()]


def _stacked(samples: Sequence[Tensors]) -> Tensors:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


async def receive(reader: asyncio.StreamReader, *, greeting: bool = False) -> Frame:
    """Receive the next frame: its header, and its samples.

    Args:
        reader: connection to the other side.
        greeting: True if the other side is unknown yet; its frame must then be small and without tensors.

    Raises:
        asyncio.IncompleteReadError, OSError: the other side is gone.
        WireError: it did not send a frame.
    """
    num_header_bytes, num_bytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    if num_header_bytes > (_MAX_GREETING_BYTES if greeting else _MAX_HEADER_BYTES) or (greeting and num_bytes):
        raise WireError("A frame is too large: this is no replica.")
    try:
        header = _object(await reader.readexactly(num_header_bytes))
        payload = await reader.readexactly(num_bytes)
        samples = [] if greeting else _unpack(header["tensors"], payload)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"A frame is damaged: {error}") from error
    return header, samples


def _object(text: bytes) -> dict[str, Any]:
    header = json.loads(text)
    if not isinstance(header, dict):
        raise TypeError("its header is no object")
    return header


def _unpack(stacks: Sequence[Sequence[tuple[str, str, Sequence[int]]]], payload: bytes) -> list[Tensors]:
    samples: list[Tensors] = []
    offset = 0
    for stack in stacks:
        arrays = {}
        for name, dtype, shape in stack:
            array = np.frombuffer(payload, dtype, count=int(np.prod(shape)), offset=offset).reshape(shape)
            arrays[name] = array
            offset += array.nbytes
        count = len(next(iter(arrays.values()))) if arrays else 0
        samples += [{name: array[row] for name, array in arrays.items()} for row in range(count)]
    return samples


async def send_batch(writer: asyncio.StreamWriter, samples: Sequence[Sample]) -> None:
    """Send a batch to a replica."""
    await send(writer, {"kind": "batch"}, samples)


async def send_answers(writer: asyncio.StreamWriter, answers: Sequence[Output | Exception]) -> None:
    """Send the answers to a batch: tensors, and for failures the text, and the traceback for the log."""
    errors = {
        index: (str(answer), _traceback_of(answer))
        for index, answer in enumerate(answers)
        if isinstance(answer, Exception)
    }
    good = [answer for answer in answers if not isinstance(answer, Exception)]
    await send(writer, {"kind": "answers", "count": len(answers), "errors": errors}, good)


def answers_of(header: dict[str, Any], samples: Sequence[Tensors]) -> list[Output | Exception]:
    """Return the answers that were passed to `send_answers`."""
    errors, good = header["errors"], iter(samples)
    return [
        _failure(*errors[str(index)]) if str(index) in errors else next(good) for index in range(int(header["count"]))
    ]


def _traceback_of(error: Exception) -> str:
    trace = "".join(traceback.format_exception(error.__cause__ or error, limit=-_MOST_FRAMES)).rstrip()
    if len(trace) > _MOST_CHARACTERS:
        trace = f"{trace[: _MOST_CHARACTERS // 2]} ... {trace[-_MOST_CHARACTERS // 2 :]}"
    return trace


def _failure(text: str, trace: str) -> ModelError:
    error = ModelError(text)
    error.__cause__ = ReplicaTraceback(f"\n{trace}")
    return error
