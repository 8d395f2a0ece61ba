"""TernGrad: every value becomes -1, 0 or 1 times the scale of its tensor, at random.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning" (2017), equations 1 to 3,
clipping: equation 11; one scale per tensor: section 3.3 ("layer-wise ternarizing").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestray.trainers.compression.bits import parts_of
from orchestray.trainers.compression.cache_blocks import blocks
from orchestray.trainers.compression.noise import stochastic_floor_
from orchestray.trainers.compression.quantised import Quantised


class TernGrad(Quantised):
    """Sends two bits per value and one scale per tensor, its largest absolute value after clipping.

    Unbiased except for clipping.

    Args:
        clip: largest magnitude of a value in standard deviations of its tensor, taken around zero (around the mean, a
        tensor of nearly equal values would be clipped to nothing); None: no clipping.
        error_feedback: True to add what a message loses to the next message; the scale is then the one that loses
        least.
        huffman: True to send the codes in a Huffman code if that is shorter.
    """

    def __init__(
        self, clip: float | None = 2.5, error_feedback: bool = False, huffman: bool = False, **common: Any
    ) -> None:
        super().__init__(2, huffman=huffman, error_feedback=error_feedback, **common)
        self._clip = clip

    def _num_scales(self, shape: torch.Size) -> int:
        return 1

    def _quantise(self, flat: Tensor, step: int) -> tuple[Tensor, Tensor]:
        scales = self._scales(flat)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        codes, generator = torch.empty_like(flat, dtype=torch.uint8), self._generator(step)
        parts = zip(parts_of(flat, self._coded_sizes), parts_of(codes, self._coded_sizes), inverse, strict=True)
        for part, code, factor in parts:
            for block in blocks(part.numel(), flat.device):
                levels = (part[block] * factor).clamp_(-1.0, 1.0).add_(1.0)
                code[block] = stochastic_floor_(levels, generator)
        if self._error_feedback:
            scales = self._nearest_scales(flat, codes)
        return scales, codes

    def _dequantise(self, scales: Tensor, codes: Tensor) -> Tensor:
        values = codes.to(scales.dtype).sub_(1.0)
        each: list[Tensor] = list(scales.unbind())
        torch._foreach_mul_(parts_of(values, self._coded_sizes), each)
        return values

    def _nearest_scales(self, flat: Tensor, codes: Tensor) -> Tensor:
        """Return the scales that minimise the error of the codes, [tensors], for the reason given in Qsgd."""
        signs = codes.to(flat.dtype).sub_(1.0)
        pairs = zip(parts_of(flat, self._coded_sizes), parts_of(signs, self._coded_sizes), strict=True)
        found = torch.stack([torch.stack([part @ sign, sign @ sign]) for part, sign in pairs])
        products, squares = found.unbind(1)
        return (products / squares).masked_fill_(squares == 0, 0.0)

    def _scales(self, flat: Tensor) -> Tensor:
        """Return the scale of each tensor, [tensors].

        It is the largest absolute value, or the clipping limit if that is less.
        """
        parts = parts_of(flat, self._coded_sizes)
        extremes = torch.stack([torch.stack(part.aminmax()) for part in parts])
        scales = extremes.abs().amax(1)
        scales.masked_fill_(scales < 256 * torch.finfo(scales.dtype).tiny, 0.0)  # its reciprocal would be infinite
        if self._clip is None:
            return scales
        roots = torch.tensor(self._coded_sizes, dtype=flat.dtype, device=flat.device).sqrt_()
        limits = torch.stack(list(torch._foreach_norm(parts, 2))).div_(roots).mul_(self._clip)
        return torch.where(scales > limits, limits, scales)
