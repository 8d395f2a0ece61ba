"""QSGD: values rounded at random to a few levels of the scale of their bucket.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (2017), section 3.1.
Buckets, with their largest value as scale, are in section 4. Lemma 3.1 bounds the variance by min(n / s^2, sqrt(n) / s)
times the squared 2-norm, with bucket size n and s levels. It holds for the 2-norm as scale, and so for any scale
between the largest value and the 2-norm.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.trainers.compression.cache_blocks import blocks
from orchestray.trainers.compression.noise import stochastic_floor_
from orchestray.trainers.compression.quantised import Quantised
from orchestray.trainers.compression.rows import Rows, rows_of


class Qsgd(Quantised):
    """Sends a code of `bits` bits per value and one scale per bucket; unbiased.

    Args:
        bits: bits of a code, 2 to 8: one of s levels of the scale with a sign, or zero; s = 2 ** (bits - 1) - 1.
        bucket: number of values that share a scale; buckets do not cross tensors.
        norm: the scale: the largest absolute value of the bucket ("max"), or its 2-norm ("l2"), as in the theorem.
        error_feedback: True to add what a message loses to the next message, which unbiased rounding does not need; the
        scale is then the one that loses least.
        huffman: True to send the codes in a Huffman code if that is shorter.
    """

    def __init__(
        self,
        bits: int = 4,
        bucket: int = 512,
        norm: Literal["max", "l2"] = "max",
        error_feedback: bool = False,
        huffman: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(bits, huffman=huffman, error_feedback=error_feedback, **common)
        self._bucket, self._norm = bucket, norm
        self._levels = 2 ** (bits - 1) - 1
        self._rows = Rows((), bucket)

    def _start(self) -> None:
        self._rows = Rows(self._coded_sizes, self._bucket)

    def _num_scales(self, shape: torch.Size) -> int:
        return rows_of(shape.numel(), self._bucket)

    def _quantise(self, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
        rows, generator = self._rows.spread(flat), self._generator(step)
        scales, codes = rows.new_empty(rows.shape[0]), torch.empty_like(rows, dtype=torch.uint8)
        for block in blocks(rows.shape[0], rows.device, self._bucket):
            scales[block], codes[block] = self._quantise_rows(rows[block], generator)
        return scales, self._rows.gather(codes)

    def _quantise_rows(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        scales = rows.norm(dim=1) if self._norm == "l2" else rows.abs().amax(1)
        scales.masked_fill_(scales < 256 * torch.finfo(scales.dtype).tiny, 0.0)  # its reciprocal would be infinite
        inverse = (self._levels / scales).masked_fill_(scales == 0, 0.0)
        levels = (rows * inverse[:, None]).add_(self._levels)
        codes = stochastic_floor_(levels, generator)
        return self._nearest_scales(rows, codes) if self._error_feedback else scales, codes

    def _dequantise(self, scales: Tensor, codes: Tensor) -> Tensor:
        levels = self._rows.spread(codes)
        units = (scales / self._levels)[:, None]
        rows = torch.empty_like(levels, dtype=scales.dtype)
        for block in blocks(levels.shape[0], levels.device, self._bucket):
            torch.mul(levels[block].to(scales.dtype).sub_(self._levels), units[block], out=rows[block])
        return self._rows.gather(rows)

    def _nearest_scales(self, rows: Tensor, codes: Tensor) -> Tensor:
        """Return the scales that minimise the error of the codes, [rows].

        An unbiased message may lose more than it contains, and with error feedback the residual would grow without
        bound. With these scales no message does. They are too small on average, which error feedback compensates.
        """
        levels = codes.to(rows.dtype).sub_(self._levels)
        squares = torch.linalg.vecdot(levels, levels)
        products = torch.linalg.vecdot(rows, levels)
        scales: Tensor = products.div_(squares).mul_(self._levels).masked_fill_(squares == 0, 0.0)
        return scales
