"""QSGD: values rounded at random to a few levels of the scale of their bucket.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (2017), section 3.1; buckets
and the largest value as their scale: section 4. Lemma 3.1 bounds the variance by min(n / s^2, sqrt(n) / s) times the
squared 2-norm, n the bucket and s the levels, for the 2-norm as scale and so for any scale between largest value and
2-norm.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, packed_bytes, unpack_bits
from orchestray.trainers.compression.huffman import huffman_decode, huffman_encode
from orchestray.trainers.compression.noise import stochastic_floor_
from orchestray.trainers.compression.rows import Rows, rows_of


class Qsgd(Compressor):
    """Sends a code of `bits` bits a value, and one scale a bucket; unbiased.

    Args:
        bits: of a code, 2 to 8: one of s levels of the scale with a sign, or zero; s = 2 ** (bits - 1) - 1.
        bucket: values that share a scale; buckets do not cross tensors.
        norm: what the scale is: the largest absolute value of the bucket ("max"), or its 2-norm, as in the theorem.
        error_feedback: add what was lost to the next message; not needed where rounding is unbiased.
        huffman: send the codes in a Huffman code, where that is shorter.
    """

    def __init__(
        self,
        bits: int = 4,
        bucket: int = 512,
        norm: Literal["max", "l2"] = "max",
        error_feedback: bool = False,
        huffman: bool = False,
        **who: Any,
    ) -> None:
        super().__init__(error_feedback=error_feedback, **who)
        self._bits, self._bucket, self._norm, self._huffman = bits, bucket, norm, huffman
        self._levels = 2 ** (bits - 1) - 1
        self._rows = Rows((), bucket)

    def _start(self) -> None:
        self._rows = Rows(self._coded_sizes, self._bucket)

    def _coded_bytes(self, shape: torch.Size) -> float:
        return rows_of(shape.numel(), self._bucket) * self.value_bytes + shape.numel() * self._bits / 8

    def _fixed_bytes(self) -> int | None:
        return None if self._huffman else self._scale_bytes + packed_bytes(self._num_coded_values, self._bits)

    @property
    def _scale_bytes(self) -> int:
        return self._rows.num_rows * self.value_bytes

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        rows = self._rows.spread(flat)
        scales = rows.norm(dim=1) if self._norm == "l2" else _largest(rows)
        scales.masked_fill_(scales < 256 * torch.finfo(scales.dtype).tiny, 0.0)  # one over it would be infinite
        inverse = (self._levels / scales).masked_fill_(scales == 0, 0.0)
        levels = rows.mul_(inverse[:, None]).add_(self._levels)
        codes = pack_bits(self._rows.gather(stochastic_floor_(levels, self._generator(step))), self._bits)
        return torch.cat([as_bytes(scales), huffman_encode(codes) if self._huffman else codes])

    def _decode(self, message: Tensor) -> Tensor:
        scales = from_bytes(message[: self._scale_bytes], self._flat.dtype)
        codes = message[self._scale_bytes :]
        if self._huffman:
            codes = huffman_decode(codes)
        levels = unpack_bits(codes, self._bits, self._num_coded_values)
        rows = self._rows.spread(levels).to(scales.dtype)
        return self._rows.gather(rows.sub_(self._levels).mul_((scales / self._levels)[:, None]))


def _largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row; not-a-number if it has one."""
    smallest, largest = rows.aminmax(dim=1)
    return torch.maximum(largest, -smallest)
