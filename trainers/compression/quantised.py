"""The base class of compressors that send a code of a few bits per value, and scales that many values share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, packed_bytes, unpack_bits
from orchestray.trainers.compression.huffman import huffman_decode, huffman_encode

_LOOKED_AT = 1 << 16
"""Codes of the first message that the report counts."""


class Quantised(Compressor):
    """Sends scales, then packed codes of `bits` bits, then the tensors that would not become smaller.

    Args:
        bits: bits of a code, 1 to 8.
        huffman: True to send the bytes of the codes in a Huffman code if that is shorter.
    """

    def __init__(self, bits: int, *, huffman: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self._bits, self._huffman = bits, huffman
        self._first_codes: Tensor | None = None
        """The first codes of the first message; None before it."""

    def run_report(self) -> dict[str, Any]:
        """Return the number of different `codes` at the beginning of the run, and what error feedback has done."""
        if self._first_codes is None:
            return {}
        codes = self._first_codes.unique()  # type: ignore[no-untyped-call]
        return {"codes": len(codes), **self.memory_report()}

    @abstractmethod
    def _num_scales(self, shape: torch.Size) -> int:
        """Return the number of scales of a tensor."""

    @abstractmethod
    def _quantise(self, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the scales of all coded tensors, and the codes, uint8 [values].

        Must not change `flat`.
        """

    @abstractmethod
    def _dequantise(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Return the values, as a new flat vector."""

    def _coded_bytes(self, shape: torch.Size) -> float:
        return self._num_scales(shape) * self.value_bytes + shape.numel() * self._bits / 8

    def _fixed_bytes(self) -> int:
        return self._scale_bytes + self._code_bytes

    @property
    def message_bytes(self) -> int | None:
        return None if self._huffman else super().message_bytes

    @property
    def _scale_bytes(self) -> int:
        return sum(self._num_scales(shape) for shape in self._coded_shapes) * self.value_bytes

    @property
    def _code_bytes(self) -> int:
        return packed_bytes(self._num_coded_values, self._bits)

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        scales, codes = self._quantise(flat, step)
        if self._first_codes is None:
            self._first_codes = codes[:_LOOKED_AT].clone()
        return torch.cat([as_bytes(scales), pack_bits(codes, self._bits)])

    def _decode(self, message: Tensor) -> Tensor:
        scales = from_bytes(message[: self._scale_bytes], self._flat.dtype)
        return self._dequantise(scales, unpack_bits(message[self._scale_bytes :], self._bits, self._num_coded_values))

    def _seal(self, plain: Tensor) -> Tensor:
        if not self._huffman:
            return plain
        ends = self._scale_bytes, self._scale_bytes + self._code_bytes
        return torch.cat([plain[: ends[0]], huffman_encode(plain[ends[0] : ends[1]]), plain[ends[1] :]])

    def _unseal(self, message: Tensor) -> Tensor:
        if not self._huffman:
            return message
        ends = self._scale_bytes, message.numel() - self._num_raw_values * self.value_bytes
        return torch.cat([message[: ends[0]], huffman_decode(message[ends[0] : ends[1]]), message[ends[1] :]])
