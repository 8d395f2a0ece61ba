"""TernGrad: every value is -1, 0 or 1 times the scale of its tensor, at random.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning" (2017), equations 1 to 3,
clipping: equation 11; one scale a tensor: section 3.3 ("layer-wise ternarizing").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.bits import as_bytes, from_bytes, pack_bits, packed_bytes, parts_of, unpack_bits
from orchestray.trainers.compression.huffman import huffman_decode, huffman_encode
from orchestray.trainers.compression.noise import stochastic_floor_

_BITS = 2


class TernGrad(Compressor):
    """Sends two bits a value, and one scale a tensor: its largest absolute value after clipping; unbiased but for that.

    Args:
        clip: values are first cut to so many standard deviations of their tensor; None: not.
        error_feedback: add what was lost to the next message.
        huffman: send the codes in a Huffman code, where that is shorter.
    """

    def __init__(
        self, clip: float | None = 2.5, error_feedback: bool = False, huffman: bool = False, **who: Any
    ) -> None:
        super().__init__(error_feedback=error_feedback, **who)
        self._clip, self._huffman = clip, huffman

    def _coded_bytes(self, shape: torch.Size) -> float:
        return self.value_bytes + shape.numel() * _BITS / 8

    def _fixed_bytes(self) -> int | None:
        return None if self._huffman else self._scale_bytes + packed_bytes(self._num_coded_values, _BITS)

    @property
    def _scale_bytes(self) -> int:
        return self._num_coded * self.value_bytes

    def _encode(self, flat: Tensor, step: int) -> Tensor:
        scales = self._scales(flat)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        levels = torch.empty_like(flat)
        parts = zip(parts_of(flat, self._coded_sizes), parts_of(levels, self._coded_sizes), inverse, strict=True)
        for part, level, factor in parts:
            torch.mul(part, factor, out=level)
        codes = stochastic_floor_(levels.clamp_(-1.0, 1.0).add_(1.0), self._generator(step))
        packed = pack_bits(codes, _BITS)
        return torch.cat([as_bytes(scales), huffman_encode(packed) if self._huffman else packed])

    def _decode(self, message: Tensor) -> Tensor:
        scales = from_bytes(message[: self._scale_bytes], self._flat.dtype)
        packed = message[self._scale_bytes :]
        if self._huffman:
            packed = huffman_decode(packed)
        values = unpack_bits(packed, _BITS, self._num_coded_values).to(scales.dtype).sub_(1.0)
        each: list[Tensor] = list(scales.unbind())
        torch._foreach_mul_(parts_of(values, self._coded_sizes), each)
        return values

    def _scales(self, flat: Tensor) -> Tensor:
        """Of each tensor [tensors]: its largest absolute value, or where it is clipped if that is less."""
        parts = parts_of(flat, self._coded_sizes)
        scales = torch.stack(list(torch._foreach_norm(parts, torch.inf)))
        scales.masked_fill_(scales < 256 * torch.finfo(scales.dtype).tiny, 0.0)  # one over it would be infinite
        if self._clip is None:
            return scales
        sizes = torch.tensor(self._coded_sizes, dtype=flat.dtype, device=flat.device)
        squares = torch.stack(list(torch._foreach_norm(parts, 2))).square_().div_(sizes)
        means = torch.stack([part.mean() for part in parts])
        deviations = (squares - means.square_()).clamp_(min=0.0).sqrt_()
        limits = deviations.mul_(self._clip)
        limits = torch.where(limits > 0, limits, scales)  # a tensor of equal values is not clipped
        return torch.where(scales > limits, limits, scales)
