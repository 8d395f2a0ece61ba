"""Tensors in few bytes, without loss: those of few different values as codes, Huffman-coded. Imports torch late.

The file of Han, Mao and Dally, "Deep Compression" (2016), sections 2 to 4. It has a table of the values of a tensor and
the code of each weight; for a sparse tensor, the gaps between its weights. Codes and gaps are Huffman-coded, by deflate
without matches of repeated strings (RFC 1951). All else is kept as it is; numbers that half precision holds exactly are
kept in half precision.

A file is 16 bytes (a mark, and three lengths as little-endian uint32), the header as deflated JSON, the gaps, the
codes, and the values. Streams of all tensors follow each other, so that they share the lengths of their codes.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.platform.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MARK = b"OHF1"
_START = struct.Struct("<4s3I")
_RAW = -15
"""Deflate's largest window, without a header and a checksum."""
_MOST_VALUES = 256
"""Largest number of values that a code of a byte tells apart."""
_LOOKED_AT = 1 << 16
_SKIP = 255
"""Gap that stands for 255 zeros, after which no weight comes."""
_OF_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error, zlib.error)
_BITS_OF = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pack_huffman(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the file of these tensors, which `unpack_huffman` reads back with the same bits."""
    streams, header = _Streams(), []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        header.append([name, dtype, list(tensor.shape), *_put(flat, streams)])
    described = _deflated(json.dumps(header, separators=(",", ":")).encode())
    gaps, codes = (_huffman(b"".join(each)) for each in (streams.gaps, streams.codes))
    start = _START.pack(_MARK, len(described), len(gaps), len(codes))
    return start + described + gaps + codes + _deflated(b"".join(streams.values))


def unpack_huffman(content: bytes, what: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, on the CPU.

    Raises:
        CheckpointError: the file is damaged; `what` names it.
    """
    try:
        mark, *lengths = _START.unpack_from(content)
        if mark != _MARK or _START.size + sum(lengths) > len(content):
            raise ValueError("its beginning makes no sense")
        ends = np.cumsum([_START.size, *lengths]).tolist()
        parts = [content[start:stop] for start, stop in zip(ends, [*ends[1:], len(content)], strict=True)]
        described, gaps, codes, values = map(_inflated, parts)
        reader = _Reader(*(np.frombuffer(each, np.uint8) for each in (gaps, codes, values)))
        tensors = {name: reader.tensor(dtype, shape, *way) for name, dtype, shape, *way in json.loads(described)}
        reader.check_end()
    except _OF_DAMAGE as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    return tensors


@dataclass
class _Streams:
    gaps: list[bytes] = field(default_factory=list)
    codes: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)


def _put(flat: torch.Tensor, streams: _Streams) -> list[Any]:
    """Append a tensor to the streams, and return what the header says of it besides its name, dtype and shape.

    That is the dtype of the values; of a tensor by codes, also the numbers of values and of gaps (None: not sparse).
    """
    raw, stored = _values(flat)
    if flat.element_size() not in _BITS_OF or flat.numel() <= 1:
        streams.values.append(raw)
        return [stored]
    bits: Any = np.frombuffer(_bytes(flat), _BITS_OF[flat.element_size()])
    looked_at = bits[:_LOOKED_AT]  # most large tensors that have many values have them at once, and sorting is slow
    table, codes = np.unique(looked_at, return_inverse=True)
    if len(looked_at) < len(bits) and len(table) <= _MOST_VALUES + 1:
        table, codes = np.unique(bits, return_inverse=True)
    if len(table) > _MOST_VALUES + 1:
        streams.values.append(raw)
        return [stored]
    places = np.flatnonzero(bits)
    kept = table[table != 0]
    forms: list[tuple[Any, bytes | None, bytes]] = []
    if len(kept) <= _MOST_VALUES:
        gaps = _gaps(places)
        sparse = np.searchsorted(kept, bits[places]).astype(np.uint8).tobytes()
        forms.append((kept, gaps, sparse))
    if len(table) <= _MOST_VALUES:
        forms.append((table, None, codes.astype(np.uint8).tobytes()))
    chosen, gaps_or_none, symbols = min(forms, key=lambda form: len(_huffman(form[1] or b"")) + len(_huffman(form[2])))
    values, stored_values = _values(_tensor(chosen.tobytes(), flat.dtype))
    if len(_huffman(gaps_or_none or b"")) + len(_huffman(symbols)) + len(values) >= len(raw):
        streams.values.append(raw)
        return [stored]
    streams.gaps.append(gaps_or_none or b"")
    streams.codes.append(symbols)
    streams.values.append(values)
    return [stored_values, len(chosen), None if gaps_or_none is None else len(gaps_or_none)]


class _Reader:
    """The streams of a file, read from their beginnings on."""

    def __init__(self, gaps: Bytes, codes: Bytes, values: Bytes) -> None:
        self._streams = {"gaps": gaps, "codes": codes, "values": values}

    def tensor(
        self, dtype: str, shape: list[int], stored: str, num_values: int | None = None, num_gaps: int | None = None
    ) -> torch.Tensor:
        import torch

        count, wanted = math.prod(shape), getattr(torch, dtype)
        if num_values is None:
            return self._values(stored, count, wanted).reshape(shape)
        table = self._values(stored, num_values, wanted)
        if num_gaps is None:
            return table[torch.from_numpy(self._next("codes", count).astype(np.int64))].reshape(shape)
        places = _places(self._next("gaps", num_gaps))
        codes = self._next("codes", len(places))
        flat = torch.zeros(count, dtype=wanted)
        flat[torch.from_numpy(places)] = table[torch.from_numpy(codes.astype(np.int64))]
        return flat.reshape(shape)

    def check_end(self) -> None:
        """Raise a ValueError if something is left."""
        for name, left in self._streams.items():
            if left.size:
                raise ValueError(f"{left.size} bytes of its {name} belong to no tensor")

    def _values(self, stored: str, count: int, wanted: torch.dtype) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, stored)
        return _tensor(self._next("values", count * dtype.itemsize).tobytes(), dtype).to(wanted)

    def _next(self, stream: str, count: int) -> Bytes:
        there = self._streams[stream]
        if not 0 <= count <= there.size:
            raise ValueError(f"its {stream} end too early")
        self._streams[stream] = there[count:]
        return there[:count]


def _gaps(places: np.ndarray[Any, Any]) -> bytes:
    """Return the numbers of zeros before each place, of ascending places; 255 and more as several bytes."""
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // _SKIP
    found = np.full(len(gaps) + int(skips.sum()), _SKIP, np.uint8)
    found[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    return found.tobytes()


def _places(gaps: Bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the places that `_gaps` described."""
    is_weight = gaps != _SKIP
    after = np.cumsum(gaps.astype(np.int64) + is_weight)
    found: np.ndarray[Any, np.dtype[np.int64]] = after[is_weight] - 1
    return found


def _values(flat: torch.Tensor) -> tuple[bytes, str]:
    """Return the bytes of values, and their dtype: half precision where that holds each exactly."""
    import torch

    if flat.dtype in (torch.float32, torch.float64):
        half = flat.to(torch.float16)
        if _bytes(half.to(flat.dtype)) == _bytes(flat):
            return _bytes(half), "float16"
    return _bytes(flat), str(flat.dtype).removeprefix("torch.")


def _bytes(flat: torch.Tensor) -> bytes:
    import torch

    content: bytes = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return content


def _tensor(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _huffman(content: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(content) + coder.flush()


def _deflated(content: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, _RAW, 9)
    return coder.compress(content) + coder.flush()


def _inflated(content: bytes) -> bytes:
    decoder = zlib.decompressobj(_RAW)
    found = decoder.decompress(content)
    if not decoder.eof or decoder.unused_data:
        raise ValueError("a part of it does not end where its codes do")
    return found
