"""Ternary weight networks: the weights of a layer are -a, 0 or a.

Li, Zhang and Liu, "Ternary Weight Networks" (2016), section 2: the threshold of equation 6, the scale of equation 5,
and the gradient of section 2.3.
"""

from __future__ import annotations

from torch import Tensor, nn

from orchestray.trainers.few_bits.base import Quantizer, Scheme, straight_through


class Twn(Scheme):
    """Ternary weights, by a threshold relative to the mean magnitude of a layer's weights."""

    def __init__(self, threshold: float = 0.7) -> None:
        """
        Args:
            threshold: factor of the mean magnitude up to which a weight becomes 0.
        """
        self._threshold = threshold

    def weights(self) -> nn.Module:
        return Ternary(self._threshold)


class Ternary(Quantizer):
    """The ternary values of a tensor: a sign times the mean magnitude of all values above the threshold, or 0."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, values: Tensor) -> Tensor:
        held = values.detach()
        sizes = held.abs()
        is_large = sizes > self.threshold * sizes.mean()
        scale = (sizes * is_large).sum() / is_large.sum().clamp_min(1)
        return straight_through(values, self.keep_example(held.sign() * is_large * scale))

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"
