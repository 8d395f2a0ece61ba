"""Messages of a few values with their indices.

A message has a header of 8 bytes (an int64: four times the number of values, plus the coding of the indices), the
values and the indices. Indices are coded as gaps (delta.py) or as a bitmap (shorter if more than one value in eight is
sent). They are left out if all values are sent, zeros included. The shortest of the three is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import (
    as_bytes,
    from_bytes,
    nonzero_indices,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from orchestray.trainers.compression.delta import decode_gaps, encode_gaps, gap_bytes

HEADER_BYTES = 8
_DENSE, _GAPS, _BITMAP = range(3)


def pack(indices: Tensor, values: Tensor, num_values: int) -> Tensor:
    """Return the message of `values` at ascending `indices` of a vector of `num_values` elements: uint8 [bytes].

    Dense exactly if the sparse form would be longer.
    """
    way = _shortest(indices, values.element_size(), num_values)
    if way == _DENSE:
        values = values.new_zeros(num_values).index_copy_(0, indices, values)
        return torch.cat([_header(num_values, way, values.device), as_bytes(values)])
    places = encode_gaps(indices) if way == _GAPS else _bitmap(indices, num_values)
    return torch.cat([_header(values.numel(), way, values.device), as_bytes(values.contiguous()), places])


def unpack(message: Tensor, num_values: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return indices and values of a message of `pack`; those of a dense one include every index.

    Raises:
        ValueError: the length of the message contradicts its header.
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
        indices = nonzero_indices(unpack_bits(message[end:], 1, num_values))
    if indices.numel() != count:
        raise ValueError(f"A sparse message has {count} values and {indices.numel()} places.")
    return indices, values


def pack_of_two(indices: Tensor, values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a message of values of which each part has but one that is positive, and one that is not.

    It has the header, these two values of each part, a bit for each value, and the indices.

    Args:
        indices: ascending, int64 [values].
        values: the values there.
        sizes: sizes of the parts of the vector, in their order.
    """
    num_values = sum(sizes)
    is_positive = values > 0
    of_parts = values.new_zeros(2 * len(sizes))
    of_parts[_group(indices, is_positive, sizes)] = values
    way = _GAPS if gap_bytes(indices) <= packed_bytes(num_values, 1) else _BITMAP
    places = encode_gaps(indices) if way == _GAPS else _bitmap(indices, num_values)
    signs = pack_bits(is_positive.to(torch.uint8), 1)
    return torch.cat([_header(values.numel(), way, values.device), as_bytes(of_parts), signs, places])


def unpack_of_two(message: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return indices and values of a message of `pack_of_two`.

    Raises:
        ValueError: the length of the message contradicts its header.
    """
    num_values, of_signs = sum(sizes), HEADER_BYTES + 2 * len(sizes) * dtype.itemsize
    if message.numel() < of_signs:
        raise ValueError(f"A sparse message of {message.numel()} bytes is shorter than its header.")
    count, way = divmod(int(from_bytes(message[:HEADER_BYTES], torch.int64)), 4)
    end = of_signs + packed_bytes(max(count, 0), 1)
    if not 0 <= count <= num_values or message.numel() < end:
        raise ValueError(f"A sparse message of {message.numel()} bytes cannot hold {count} of {num_values} values.")
    is_positive = unpack_bits(message[of_signs:end], 1, count).bool()
    rest = message[end:]
    indices = decode_gaps(rest) if way == _GAPS else nonzero_indices(unpack_bits(rest, 1, num_values))
    if indices.numel() != count:
        raise ValueError(f"A sparse message has {count} values and {indices.numel()} places.")
    of_parts = from_bytes(message[HEADER_BYTES:of_signs], dtype)
    return indices, of_parts[_group(indices, is_positive, sizes)]


def _group(indices: Tensor, is_positive: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return twice the number of the part that each index is in, and 1 more where the value is positive."""
    ends = torch.tensor(sizes, device=indices.device).cumsum(0)
    return 2 * torch.bucketize(indices, ends, right=True) + is_positive


def mean_of_each(indices: Tensor, values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return for each value the mean of the values of its sign in its part; NaN counts as not positive.

    Args:
        indices: indices of the values, ascending.
        values: the values there.
        sizes: sizes of the parts.
    """
    group = _group(indices, values > 0, sizes)
    sums, counts = (values.new_zeros(2 * len(sizes)) for _ in range(2))
    sums.index_add_(0, group, values)
    counts.index_add_(0, group, torch.ones_like(values))
    return (sums / counts)[group]


def _shortest(indices: Tensor, value_bytes: int, num_values: int) -> int:
    """Return the coding with which the whole message is shortest."""
    dense = num_values * value_bytes
    bitmap = indices.numel() * value_bytes + packed_bytes(num_values, 1)
    lengths = {_BITMAP: bitmap, _DENSE: dense}
    if min(lengths.values()) >= indices.numel() * (value_bytes + 1):  # a gap has at least one byte
        lengths = {_GAPS: indices.numel() * value_bytes + gap_bytes(indices), **lengths}
    return min(lengths, key=lambda way: lengths[way])


def _header(count: int, way: int, device: torch.device) -> Tensor:
    return as_bytes(torch.tensor([4 * count + way], dtype=torch.int64, device=device))


def _bitmap(indices: Tensor, num_values: int) -> Tensor:
    marks = torch.zeros(num_values, dtype=torch.uint8, device=indices.device)
    return pack_bits(marks.index_fill_(0, indices, 1), 1)
