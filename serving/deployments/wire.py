"""Batches between processes: a frame is a JSON header and raw tensors. No pickle, one copy each way."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.signature import Output, Sample, Tensors

_SIZES = struct.Struct("!IQ")
_MAX_HEADER_BYTES = 2**24
_MAX_GREETING_BYTES = 2**20

Frame: TypeAlias = tuple[dict[str, Any], list[Tensors]]
"""A header and samples."""


class WireError(OrchestrayError):
    """The other side sends what is no frame."""


async def send(writer: asyncio.StreamWriter, header: dict[str, Any], samples: Sequence[Tensors] = ()) -> None:
    """Send a frame.

    Args:
        writer: to the other side.
        header: JSON values.
        samples: arrays by name, alike in names, types and shapes.
    """
    write(writer, header, samples)
    await writer.drain()


def write(writer: asyncio.StreamWriter, header: dict[str, Any], samples: Sequence[Tensors] = ()) -> None:
    """As `send`, for a few bytes that need not be waited for; what is written first arrives first.

    Raises:
        OSError: the connection has ended.
    """
    if writer.is_closing():  # uvloop's transports would raise a RuntimeError
        raise ConnectionResetError("the connection has ended")
    stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]} if samples else {}
    tensors = [[name, str(array.dtype), array.shape] for name, array in stacked.items()]
    text = json.dumps({**header, "tensors": tensors}).encode()
    writer.write(_SIZES.pack(len(text), sum(array.nbytes for array in stacked.values())) + text)
    for array in stacked.values():
        writer.write(array.reshape(-1).view(np.uint8).data)


async def receive(reader: asyncio.StreamReader, *, greeting: bool = False) -> Frame:
    """The next frame: its header, and its samples.

    Args:
        reader: from the other side.
        greeting: whether it comes from somebody not known yet: then it is small, and has no tensors.

    Raises:
        asyncio.IncompleteReadError, OSError: the other side is gone.
        WireError: it sends no frame.
    """
    num_header_bytes, num_bytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    if num_header_bytes > (_MAX_GREETING_BYTES if greeting else _MAX_HEADER_BYTES) or (greeting and num_bytes):
        raise WireError("A frame is too large: this is no replica.")
    try:
        header = json.loads(await reader.readexactly(num_header_bytes))
        payload = await reader.readexactly(num_bytes)
        samples = _unpack(header["tensors"], payload)
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"A frame is damaged: {error}") from error
    return header, samples


def _unpack(tensors: Sequence[tuple[str, str, Sequence[int]]], payload: bytes) -> list[Tensors]:
    arrays, offset = {}, 0
    for name, dtype, shape in tensors:
        array = np.frombuffer(payload, dtype, count=int(np.prod(shape)), offset=offset).reshape(shape)
        arrays[name] = array
        offset += array.nbytes
    count = len(next(iter(arrays.values()))) if arrays else 0
    return [{name: array[row] for name, array in arrays.items()} for row in range(count)]


async def send_batch(writer: asyncio.StreamWriter, samples: Sequence[Sample]) -> None:
    """Hand a batch to a replica."""
    await send(writer, {"kind": "batch"}, samples)


async def send_answers(writer: asyncio.StreamWriter, answers: Sequence[Output | Exception]) -> None:
    """Answer a batch: what failed by its text, the others by their tensors."""
    errors = {index: str(answer) for index, answer in enumerate(answers) if isinstance(answer, Exception)}
    good = [answer for answer in answers if not isinstance(answer, Exception)]
    await send(writer, {"kind": "answers", "count": len(answers), "errors": errors}, good)


def answers_of(header: dict[str, Any], samples: Sequence[Tensors]) -> list[Output | Exception]:
    """What `send_answers` was given."""
    errors, good = header["errors"], iter(samples)
    return [
        ModelError(errors[str(index)]) if str(index) in errors else next(good) for index in range(int(header["count"]))
    ]
