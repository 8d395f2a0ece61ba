"""A PyTorch module with generated weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class PaintedNetwork(nn.Module):
    """Linear layers without biases from a plane to outputs, with tanh between them.

    Args:
        weights: of each layer, [outputs, inputs].
        is_channeled: True if inputs are [batch, channels, height, width], whose channels are averaged.
    """

    def __init__(self, weights: Sequence[np.ndarray], is_channeled: bool) -> None:
        super().__init__()
        dtype = torch.get_default_dtype()
        self.weights = nn.ParameterList(torch.as_tensor(layer, dtype=dtype) for layer in weights)
        self.is_channeled = is_channeled

    def forward(self, inputs: Tensor) -> Tensor:
        first, *others = self.weights
        plane = inputs.mean(dim=1) if self.is_channeled else inputs
        values: Tensor = plane.flatten(1).to(first.dtype) @ first.T
        for weights in others:
            values = torch.tanh(values) @ weights.T
        return values
