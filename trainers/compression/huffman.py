"""Huffman coding of bytes, by zlib: deflate without matches of repeated strings, which leaves the codes alone.

Huffman 1952; the codes of deflate are canonical (RFC 1951, section 3.2.2), so that their lengths determine them.
Huffman coding after quantisation follows Han, Mao and Dally, "Deep Compression" (2016), section 4.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from orchestray.trainers.compression.bits import as_bytes, from_bytes

_HEADER_BYTES = 8
_RAW = -15
"""Deflate's largest window, without a header and a checksum."""


def huffman_encode(symbols: Tensor) -> Tensor:
    """Return a message of the bytes `symbols`, uint8 [symbols], at most 8 bytes longer than they are.

    Returns:
        uint8 [bytes], on the same device: a header (an int64: twice the number of bytes, plus 1 if they are coded), and
        the coded bytes, or the bytes themselves where their code is not shorter.
    """
    coder = zlib.compressobj(method=zlib.DEFLATED, wbits=_RAW, strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(symbols.cpu().numpy().data) + coder.flush()
    num_symbols = symbols.numel()
    if len(coded) >= num_symbols:
        return torch.cat([_header(2 * num_symbols, symbols.device), symbols])
    body = torch.from_numpy(np.frombuffer(bytearray(coded), dtype=np.uint8)).to(symbols.device)
    return torch.cat([_header(2 * num_symbols + 1, symbols.device), body])


def huffman_decode(message: Tensor) -> Tensor:
    """Return the bytes that `huffman_encode` encoded.

    Raises:
        ValueError: the message is damaged, or its length contradicts its header.
    """
    if message.numel() < _HEADER_BYTES:
        raise ValueError(f"A Huffman message of {message.numel()} bytes is shorter than its header.")
    num_symbols, coded = divmod(int(from_bytes(message[:_HEADER_BYTES], torch.int64)), 2)
    body = message[_HEADER_BYTES:]
    if coded:
        decoder = zlib.decompressobj(_RAW)
        try:
            found = bytearray(decoder.decompress(body.cpu().numpy().data, max(num_symbols, 0) + 1))
        except zlib.error as error:
            raise ValueError(f"A Huffman message of {message.numel()} bytes cannot be decoded: {error}.") from error
        is_whole = decoder.eof and not decoder.unused_data
        body = torch.from_numpy(np.frombuffer(found, dtype=np.uint8)).to(message.device)
        if not is_whole:
            raise ValueError(f"A Huffman message of {message.numel()} bytes does not end where its codes do.")
    if body.numel() != num_symbols:
        raise ValueError(f"A Huffman message says {num_symbols} bytes and has {body.numel()}.")
    return body


def _header(number: int, device: torch.device) -> Tensor:
    return as_bytes(torch.tensor([number], dtype=torch.int64, device=device))
