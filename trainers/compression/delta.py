"""Coding of ascending indices as gaps: seven bits per byte, the highest bit set if more bytes follow.

Same as in posting lists of search engines (Manning, Raghavan and Schuetze, "Introduction to Information Retrieval",
2008, section 5.3.1). If one value in a thousand is sent, a gap has at most two bytes in all but one case in ten
million.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import nonzero_indices

_BITS = 7
_MORE = 1 << _BITS


def encode_gaps(indices: Tensor) -> Tensor:
    """Encode ascending indices without duplicates as uint8 [gap_bytes(indices)].

    Args:
        indices: int64 [indices], at least 0.
    """
    gaps = _gaps(indices)
    lengths = _lengths(gaps)
    if lengths is None:
        return gaps.to(torch.uint8)
    starts = lengths.cumsum(0).sub_(lengths)
    encoded = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=indices.device)
    for number in range(int(lengths.max())):
        if number:
            longer = nonzero_indices(lengths > number)
            lengths, gaps, starts = lengths[longer], gaps[longer] >> _BITS, starts[longer] + 1
        more = (lengths > number + 1) * _MORE
        encoded[starts] = (gaps & (_MORE - 1)).bitwise_or_(more).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Return the indices that `encode_gaps` encoded, int64."""
    ends = nonzero_indices(encoded < _MORE)
    if ends.numel() == encoded.numel():
        return encoded.to(torch.int64).add_(1).cumsum_(0).sub_(1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    lengths = ends - starts + 1
    gaps = encoded[starts].to(torch.int64).bitwise_and_(_MORE - 1)
    for number in range(1, int(lengths.max()) if lengths.numel() else 0):
        longer = nonzero_indices(lengths > number)
        part = encoded[starts[longer] + number].to(torch.int64).bitwise_and_(_MORE - 1)
        gaps.index_add_(0, longer, part << (_BITS * number))
    return gaps.add_(1).cumsum_(0).sub_(1)


def gap_bytes(indices: Tensor) -> int:
    """Return the length of `encode_gaps(indices)`."""
    gaps = _gaps(indices)
    lengths = _lengths(gaps)
    return gaps.numel() if lengths is None else int(lengths.sum())


def _gaps(indices: Tensor) -> Tensor:
    """Return the number of indices skipped before each index."""
    if not indices.numel():
        return indices
    return torch.cat([indices[:1], indices.diff().sub_(1)])


def _lengths(gaps: Tensor) -> Tensor | None:
    """Return the number of bytes of each gap, int64; None if all have one byte."""
    largest = int(gaps.max()) if gaps.numel() else 0
    if largest < _MORE:
        return None
    lengths = torch.ones_like(gaps)
    bits = _BITS
    while largest >> bits:
        lengths += gaps >= 1 << bits
        bits += _BITS
    return lengths
