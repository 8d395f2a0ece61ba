"""Messages of a few values with their places.

A header of 8 bytes (an int64: four times the number of values, plus how the places are written), the values, the
places: as gaps (delta.py), as one bit for every place there is (shorter where more than one value in eight is sent), or
not at all where all values are sent, zeros among them. Of the three the shortest is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import (
    as_bytes,
    from_bytes,
    pack_bits,
    packed_bytes,
    places_of,
    unpack_bits,
)
from orchestray.trainers.compression.delta import decode_gaps, encode_gaps, gap_bytes

HEADER_BYTES = 8
_DENSE, _GAPS, _BITMAP = range(3)


def pack(indices: Tensor, values: Tensor, num_values: int) -> Tensor:
    """The message of `values` at ascending `indices` out of `num_values` places: uint8 [bytes].

    Dense exactly when the sparse form would be longer.
    """
    way, _ = _shortest(indices, values.element_size(), num_values)
    if way == _DENSE:
        values = values.new_zeros(num_values).index_copy_(0, indices, values)
        return torch.cat([_header(num_values, way, values.device), as_bytes(values)])
    places = encode_gaps(indices) if way == _GAPS else _bitmap(indices, num_values)
    return torch.cat([_header(values.numel(), way, values.device), as_bytes(values.contiguous()), places])


def packed_length(indices: Tensor, value_bytes: int, num_values: int) -> int:
    """The length of `pack` for values of `value_bytes` each."""
    return _shortest(indices, value_bytes, num_values)[1]


def unpack(message: Tensor, num_values: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places and values of a message of `pack`; of a dense one, every place.

    Raises:
        ValueError: the message is not as long as it says.
    """
    if message.numel() < HEADER_BYTES:
        raise ValueError(f"A sparse message of {message.numel()} bytes is shorter than its header.")
    count, way = divmod(int(from_bytes(message[:HEADER_BYTES], torch.int64)), 4)
    end = HEADER_BYTES + count * dtype.itemsize
    values = from_bytes(message[HEADER_BYTES:end], dtype) if 0 <= count <= num_values else None
    if values is None or values.numel() != count:
        raise ValueError(f"A sparse message of {message.numel()} bytes cannot hold {count} of {num_values} values.")
    if way == _DENSE:
        indices = torch.arange(num_values, device=message.device)
    elif way == _GAPS:
        indices = decode_gaps(message[end:])
    else:
        indices = places_of(unpack_bits(message[end:], 1, num_values))
    if indices.numel() != count:
        raise ValueError(f"A sparse message has {count} values and {indices.numel()} places.")
    return indices, values


def _shortest(indices: Tensor, value_bytes: int, num_values: int) -> tuple[int, int]:
    """How to write, and the bytes of the whole message."""
    dense = num_values * value_bytes
    bitmap = indices.numel() * value_bytes + packed_bytes(num_values, 1)
    lengths = {_BITMAP: bitmap, _DENSE: dense}
    if min(lengths.values()) >= indices.numel() * (value_bytes + 1):  # a gap takes a byte at least
        lengths = {_GAPS: indices.numel() * value_bytes + gap_bytes(indices), **lengths}
    way = min(lengths, key=lambda way: lengths[way])
    return way, HEADER_BYTES + lengths[way]


def _header(count: int, way: int, device: torch.device) -> Tensor:
    return as_bytes(torch.tensor([4 * count + way], dtype=torch.int64, device=device))


def _bitmap(indices: Tensor, num_values: int) -> Tensor:
    marks = torch.zeros(num_values, dtype=torch.uint8, device=indices.device)
    return pack_bits(marks.index_fill_(0, indices, 1), 1)
