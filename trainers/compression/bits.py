"""Packing of codes of 1 to 8 bits into bytes, tensors as bytes, and other small tools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_CODES_PER_WORD = 8


def pack_bits(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes of `num_bits` bits each, the first into the lowest bits of the first byte.

    Args:
        codes: uint8 [codes], each below 2 ** num_bits.
        num_bits: 1 to 8.

    Returns:
        uint8 [packed_bytes(codes, num_bits)].
    """
    num_bytes = packed_bytes(codes.numel(), num_bits)
    if num_bits == 8:
        return codes
    codes = functional.pad(codes, (0, -codes.numel() % _CODES_PER_WORD))  # at most a copy, which is aligned
    if num_bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)[:num_bytes]
    if num_bits == 2:
        fours = codes.view(torch.int32)
        fours = (fours >> 6).bitwise_or_(fours)  # codes 0 and 1 in the lowest four bits, 2 and 3 in bits 16 to 19
        return (fours >> 12).bitwise_or_(fours).to(torch.uint8)[:num_bytes]
    words = codes.view(torch.int64)
    for width in (1, 2, 4):  # join pairs of groups of adjacent codes that are 8 * width bits apart
        group = width * num_bits
        low = _lanes((1 << group) - 1, 16 * width)
        high = (words >> (8 * width - group)).bitwise_and_(_signed(low << group))
        words = (words & _signed(low)).bitwise_or_(high)
    if num_bits in (1, 2, 4):
        return words.to(torch.uint8)[:num_bytes]
    return words.view(torch.uint8).view(-1, 8)[:, :num_bits].reshape(-1)[:num_bytes]


def unpack_bits(packed: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """Return the first `num_codes` codes that `pack_bits` packed: uint8 [num_codes].

    Raises:
        ValueError: `packed` has another length than that many codes.
    """
    if packed.numel() != packed_bytes(num_codes, num_bits):
        raise ValueError(f"{num_codes} codes of {num_bits} bits are not {packed.numel()} bytes long.")
    if num_bits == 8:
        return packed
    if num_bits == 4:
        pairs = packed.to(torch.int16)
        return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)[:num_codes]
    if num_bits == 2:
        fours = packed.to(torch.int32)
        fours = (fours << 12).bitwise_or_(fours).bitwise_and_(0x000F000F)
        return (fours << 6).bitwise_or_(fours).bitwise_and_(0x03030303).view(torch.uint8)[:num_codes]
    if num_bits == 1:
        words = packed.to(torch.int64)
    else:
        filled = functional.pad(packed, (0, -packed.numel() % num_bits)).view(-1, num_bits)
        words = functional.pad(filled, (0, 8 - num_bits)).view(torch.int64).view(-1)
    for width in (4, 2, 1):
        group = width * num_bits
        low = _lanes((1 << group) - 1, 16 * width)
        high = (words & _signed(low << group)) << (8 * width - group)
        words = (words & _signed(low)).bitwise_or_(high)
    return words.view(torch.uint8)[:num_codes]


def packed_bytes(num_codes: int, num_bits: int) -> int:
    """Return the number of bytes of `num_codes` codes of `num_bits` bits."""
    return -(-num_codes * num_bits // 8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as uint8 [bytes], in the machine's byte order, which both ends share."""
    return tensor.reshape(-1).view(torch.uint8)


def from_bytes(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a flat copy of the values of `as_bytes`; a view is impossible for an unaligned part of a message."""
    return message.clone().view(dtype)


def nonzero_indices(mask: Tensor) -> Tensor:
    """Return the indices of the non-zeros of a flat tensor of bool, or of 0 and 1 in uint8: int64, ascending."""
    if mask.device.type != "cpu":
        return mask.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # two to ten times as fast as torch


def parts_of(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a flat tensor into views: its first `sizes[0]` elements, the next `sizes[1]`, and so on to its end."""
    return list(torch.split(flat, list(sizes)))


def _lanes(pattern: int, distance: int) -> int:
    """Return 64 bits with `pattern` at every multiple of `distance`."""
    return sum(pattern << start for start in range(0, 64, distance))


def _signed(word: int) -> int:
    """Return the int64 with these 64 bits."""
    return word - (1 << 64) if word >= 1 << 63 else word
