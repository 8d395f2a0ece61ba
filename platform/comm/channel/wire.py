"""The byte format of a message: `blob` (prefix, JSON header, meta, small tensors), then each large tensor in place.

Tensors of up to SMALL_BYTES are part of the blob, so a message of small tensors is one write. Larger ones are read from
and written into their own memory. Pickle is not used: a peer can choose shapes and dtypes, but cannot run code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import ChannelMismatchError, Message, Meta, Request

SMALL_BYTES = 16 * 1024
PREFIX = struct.Struct("<QII")  # bytes of the whole blob, of its JSON header, and of its meta

_TO_JSON = json.JSONEncoder(separators=(",", ":"))  # making one takes longer than using it

Shape = tuple[int, ...]
Spec = tuple[str, Shape]  # dtype without "torch.", shape


@dataclass(frozen=True)
class Packed:
    """A message ready for the wire.

    `large` are flat uint8 CPU tensors that share memory with the sender's if possible.
    """

    blob: bytearray
    large: list[Tensor]
    payload_bytes: int
    overhead_bytes: int
    file: int | None = None
    """Open file of an offered block; then the message itself is empty."""


def spec_of(tensor: Tensor) -> Spec:
    """Return the dtype and shape of a tensor."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def check_dense(tensors: Sequence[Tensor]) -> None:
    """Raise TypeError for tensors without flat bytes (sparse or quantized)."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise TypeError(
                f"a channel carries dense tensors, got a {kind} one; send its values and indices as two tensors"
            )


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a 1-D uint8 CPU tensor: the same memory if contiguous and on the CPU, else a copy."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = plain.cpu().contiguous()
    return plain.view(-1).view(torch.uint8)


def content_of(meta: Meta) -> bytes:
    """Return the bytes of a message's meta; raise TypeError if it is neither bytes nor JSON."""
    return meta if isinstance(meta, bytes) else _TO_JSON.encode(meta or {}).encode()


def pack(tensors: tuple[Tensor, ...], tag: str, meta: Meta) -> Packed:
    """Pack a message; raise TypeError if a tensor is sparse or quantized, or if `meta` is not JSON."""
    check_dense(tensors)
    header, content = _TO_JSON.encode([tag, [spec_of(t) for t in tensors]]).encode(), content_of(meta)
    flats = [flat_bytes(t) for t in tensors]
    blob = bytearray(PREFIX.size) + header + content
    for flat in flats:
        if flat.numel() <= SMALL_BYTES:
            blob += flat.numpy().data
    PREFIX.pack_into(blob, 0, len(blob), len(header), len(content))
    large = [flat for flat in flats if flat.numel() > SMALL_BYTES]
    return Packed(blob, large, sum([flat.numel() for flat in flats]), PREFIX.size + len(header) + len(content))


def pack_offer(file: int) -> Packed:
    """Return the packed offer of a block: a prefix alone."""
    return Packed(bytearray(PREFIX.pack(PREFIX.size, 0, 0)), [], 0, PREFIX.size, file)


class Landing:
    """A message that arrives, with its small tensors filled already.

    The caller fills the large ones in order, and then calls `finish`. A message that does not fit the request is
    written into memory of its own, and `finish` raises an error.

    Attributes:
        large: flat uint8 CPU tensors that the transport fills.
        payload_bytes: bytes of all tensors.
    """

    def __init__(self, blob: bytearray, request: Request, who: str) -> None:
        _, header_bytes, content_bytes = PREFIX.unpack_from(blob)
        start = PREFIX.size + header_bytes
        self._tag, described = json.loads(blob[PREFIX.size : start])
        self._content = bytes(blob[start : start + content_bytes])
        specs: list[Spec] = [(dtype, tuple(shape)) for dtype, shape in described]
        self._mismatch = _mismatch(self._tag, specs, request, who)
        if request.targets is not None and not self._mismatch:
            self._targets, self._answer = tuple([target.detach() for target in request.targets]), request.targets
        else:
            self._targets = self._answer = tuple([_empty(spec) for spec in specs])
        self._flats = [
            flat_bytes(t) if t.is_contiguous() and t.device.type == "cpu" else _staging(t) for t in self._targets
        ]
        self.large = [flat for flat in self._flats if flat.numel() > SMALL_BYTES]
        self.payload_bytes = sum([flat.numel() for flat in self._flats])
        start += content_bytes
        for flat in self._flats:
            if 0 < flat.numel() <= SMALL_BYTES:
                flat.copy_(torch.frombuffer(blob, dtype=torch.uint8, count=flat.numel(), offset=start))
                start += flat.numel()

    def finish(self) -> Message:
        """Return the message; raise ChannelMismatchError if it does not fit the request."""
        if self._mismatch:
            raise ChannelMismatchError(self._mismatch)
        for target, flat in zip(self._targets, self._flats, strict=True):
            if target.data_ptr() != flat.data_ptr() and target.numel():
                target.copy_(flat.view(target.dtype).view(target.shape))
        return Message(self._answer, self._tag, self._content)


def deliver(message: Message, request: Request, who: str) -> Message:
    """Answer a request with a message in memory.

    The receiver owns `message`, so its tensors are the answer, unless the request has tensors to fill.
    """
    specs = [spec_of(t) for t in message.tensors] if request.targets is not None else []
    mismatch = _mismatch(message.tag, specs, request, who)
    if mismatch:
        raise ChannelMismatchError(mismatch)
    if request.targets is None:
        return message
    for target, tensor in zip(request.targets, message.tensors, strict=True):
        target.detach().copy_(tensor)
    return Message(request.targets, message.tag, message.content)


def _mismatch(tag: str, specs: list[Spec], request: Request, who: str) -> str | None:
    if request.tag is not None and tag != request.tag:
        return f"{who} expected a message {request.tag!r} and got {tag!r}"
    if request.targets is None:
        return None
    wanted = [spec_of(t) for t in request.targets]
    if wanted == specs:
        return None
    return f"{who} expected {_names(wanted)} and got {_names(specs)}"


def _names(specs: list[Spec]) -> str:
    return (
        ", ".join(f"{dtype}{list(shape)}" for dtype, shape in specs[:4]) + (", ..." if len(specs) > 4 else "")
        or "no tensor"
    )


def _empty(spec: Spec) -> Tensor:
    name, shape = spec
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelMismatchError(f"the peer sent a tensor of dtype {name!r}, which this torch does not have")
    return torch.empty(shape, dtype=dtype)


def _staging(tensor: Tensor) -> Tensor:
    return torch.empty(math.prod(tensor.shape) * tensor.element_size(), dtype=torch.uint8)
