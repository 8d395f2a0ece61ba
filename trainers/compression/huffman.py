"""Huffman coding of bytes, encoded and decoded by tables, many bytes at once.

Huffman 1952. Codes are canonical (Schwartz and Kallick 1964), so that their lengths determine them. They have at most
12 bits (package-merge: Larmore and Hirschberg 1990), so that a table in the first-level cache decodes them. Huffman
coding after quantisation follows Han, Mao and Dally, "Deep Compression" (2016), section 4.

The bytes are split into chunks of 256, whose lengths in bits are sent too. All chunks are decoded in parallel, one byte
of each at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, unpack_bits

MAX_CODE_BITS = 12
_SYMBOLS = 256
_CHUNK = 256
"""Bytes per chunk, where decoding starts; each chunk costs 16 bits for its length."""
_HEADER_BYTES = 8
_LENGTHS_BYTES = _SYMBOLS // 2
_WORD_BITS = 32


def huffman_encode(symbols: Tensor) -> Tensor:
    """Return a message of the bytes `symbols`, uint8 [symbols], at most 8 bytes longer than they are.

    Returns:
        uint8 [bytes]: a header (an int64: twice the number of bytes, plus 1 if they are coded), 128 bytes of code
        lengths, the number of bits of each chunk (16 bits each), the codes in words of 32 bits, the first in the lowest
        bits.
    """
    num_symbols = symbols.numel()
    lengths = code_lengths(torch.bincount(symbols, minlength=_SYMBOLS))
    pair_codes, pair_lengths = _pairs(lengths)
    # A last odd byte is padded with a byte that has a code; the header has the number of bytes.
    pairs = functional.pad(symbols, (0, num_symbols % 2), value=int(lengths.bool().nonzero()[:1].sum()))
    places = pairs.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    widths = pair_lengths.index_select(0, places)
    ends = widths.cumsum(0)
    num_bits = int(ends[-1]) if num_symbols else 0
    num_words = -(-num_bits // _WORD_BITS)
    num_chunks = -(-num_symbols // _CHUNK)
    coded_bytes = _LENGTHS_BYTES + 2 * num_chunks + num_words * _WORD_BITS // 8
    if coded_bytes >= num_symbols:
        return torch.cat([_header(2 * num_symbols, symbols.device), symbols])
    starts = ends - widths
    codes = pair_codes.index_select(0, places).bitwise_left_shift_(starts & (_WORD_BITS - 1))
    words = starts.bitwise_right_shift_(_WORD_BITS.bit_length() - 1)
    filled = codes.new_zeros(num_words + 1)  # codes do not overlap in any bit, so addition merges them
    filled.index_add_(0, words, codes & 0xFFFFFFFF)
    filled.index_add_(0, words.add_(1), codes.bitwise_right_shift_(_WORD_BITS))
    chunk_ends = torch.cat([ends[_CHUNK // 2 - 1 :: _CHUNK // 2], ends[-1:]])[:num_chunks]
    chunk_bits = chunk_ends.diff(prepend=chunk_ends.new_zeros(1)).to(torch.int16)
    parts = [pack_bits(lengths, 4), as_bytes(chunk_bits), as_bytes(filled[:num_words].to(torch.int32))]
    return torch.cat([_header(2 * num_symbols + 1, symbols.device), *parts])


def huffman_decode(message: Tensor) -> Tensor:
    """Return the bytes that `huffman_encode` encoded.

    Raises:
        ValueError: the length of the message contradicts its header.
    """
    if message.numel() < _HEADER_BYTES:
        raise ValueError(f"A Huffman message of {message.numel()} bytes is shorter than its header.")
    num_symbols, coded = divmod(int(from_bytes(message[:_HEADER_BYTES], torch.int64)), 2)
    body = message[_HEADER_BYTES:]
    if not coded:
        if body.numel() != num_symbols:
            raise ValueError(f"A Huffman message says {num_symbols} bytes and has {body.numel()}.")
        return body
    num_chunks = -(-num_symbols // _CHUNK)
    words_at = _LENGTHS_BYTES + 2 * num_chunks
    if num_symbols < 0 or body.numel() < words_at or (body.numel() - words_at) % (_WORD_BITS // 8):
        raise ValueError(f"A Huffman message of {message.numel()} bytes cannot hold {num_symbols} coded bytes.")
    lengths = unpack_bits(body[:_LENGTHS_BYTES], 4, _SYMBOLS)
    chunk_bits = from_bytes(body[_LENGTHS_BYTES:words_at], torch.int16).to(torch.int64)
    num_words = body.numel() - words_at
    if -(-int(chunk_bits.sum()) // _WORD_BITS) * (_WORD_BITS // 8) != num_words:
        raise ValueError(f"A Huffman message has {num_words} bytes of codes where its chunks say another number.")
    windows = _windows(from_bytes(body[words_at:], torch.int32))
    return _decode_chunks(windows, chunk_bits.cumsum(0) - chunk_bits, lengths)[:num_symbols]


def code_lengths(counts: Tensor) -> Tensor:
    """Return the bit lengths of the best prefix-free code of at most `MAX_CODE_BITS` bits; 0 for unused symbols.

    Args:
        counts: int64 [symbols], number of occurrences of each; at most 2 ** MAX_CODE_BITS symbols.

    Returns:
        uint8 [symbols].
    """
    histogram = counts.cpu().numpy()
    used = np.flatnonzero(histogram)
    lengths = np.zeros(len(histogram), dtype=np.uint8)
    lengths[used] = _package_merge(histogram[used])
    return torch.from_numpy(lengths).to(counts.device)


def canonical_codes(lengths: Tensor) -> Tensor:
    """Return the codes of these lengths, the first bit lowest: int64 [symbols].

    Codes are ordered as binary fractions by length, then by symbol.
    """
    order, spans = _canonical_order(lengths)
    codes = torch.zeros_like(lengths, dtype=torch.int64)
    codes[order] = _reversed(spans.cumsum(0) - spans)
    return codes


def _package_merge(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the best code lengths for symbols that all occur: they minimise the sum of `counts` times lengths."""
    num_symbols = len(counts)
    if num_symbols < 2:
        return np.ones(num_symbols, dtype=np.int64)
    weights, members = counts[:0], np.empty((0, num_symbols), dtype=np.int16)
    for _ in range(MAX_CODE_BITS):
        # Pairs of the items of one bit less, and every symbol with one bit, the lightest first.
        even = len(weights) // 2 * 2
        weights = np.concatenate([counts, weights[:even:2] + weights[1:even:2]])
        members = np.concatenate([np.eye(num_symbols, dtype=np.int16), members[:even:2] + members[1:even:2]])
        order = np.argsort(weights, kind="stable")
        weights, members = weights[order], members[order]
    lengths: npt.NDArray[np.int64] = members[: 2 * num_symbols - 2].sum(0)
    return lengths


def _pairs(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and lengths of all pairs of bytes, the first in the low byte: int64 [65536]."""
    codes, wide = canonical_codes(lengths), lengths.to(torch.int64)
    both = codes[None, :] | (codes[:, None] << wide[None, :])
    return both.view(-1), (wide[None, :] + wide[:, None]).view(-1)


def _canonical_order(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symbols with a code, in the order of their codes, and the span of each.

    The span is the number of words of MAX_CODE_BITS bits that start with the code.
    """
    used = lengths.nonzero().view(-1)
    order = used[lengths[used].argsort(stable=True)]
    return order, 1 << (MAX_CODE_BITS - lengths[order].to(torch.int64))


def _reversed(codes: Tensor) -> Tensor:
    """Return the lowest MAX_CODE_BITS bits in reverse order."""
    turned = torch.zeros_like(codes)
    for bit in range(MAX_CODE_BITS):
        turned |= ((codes >> bit) & 1) << (MAX_CODE_BITS - 1 - bit)
    return turned


def _decoding_table(lengths: Tensor) -> Tensor:
    """Return a table indexed by the next MAX_CODE_BITS bits; int32.

    An entry is the first decoded byte, plus 256 times the length of its code.
    """
    order, spans = _canonical_order(lengths)
    entries = (order + lengths[order].to(torch.int64) * _SYMBOLS).repeat_interleave(spans).to(torch.int32)
    table = entries.new_full((1 << MAX_CODE_BITS,), _SYMBOLS)  # words that start with no code advance by one bit
    table[_reversed(torch.arange(entries.numel(), device=lengths.device))] = entries
    return table


def _windows(words: Tensor) -> Tensor:
    """Return each word with the next one above it, int64, with enough zeros for a short last chunk."""
    spare = _CHUNK * MAX_CODE_BITS // _WORD_BITS + 2
    wide = functional.pad(words.to(torch.int64).bitwise_and_(0xFFFFFFFF), (0, spare))
    return wide[:-1] | (wide[1:] << _WORD_BITS)


def _decode_chunks(windows: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """Decode all chunks at once, from the bits where they start: uint8 [chunks * _CHUNK]."""
    table = _decoding_table(lengths)
    entries = torch.empty(_CHUNK, positions.numel(), dtype=torch.int32, device=positions.device)
    for entry in entries:
        window = windows.index_select(0, positions >> 5).bitwise_right_shift_(positions & (_WORD_BITS - 1))
        torch.index_select(table, 0, window.bitwise_and_((1 << MAX_CODE_BITS) - 1), out=entry)
        positions = positions + (entry >> 8)
    return entries.to(torch.uint8).T.reshape(-1)


def _header(number: int, device: torch.device) -> Tensor:
    return as_bytes(torch.tensor([number], dtype=torch.int64, device=device))
