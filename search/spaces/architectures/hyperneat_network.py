"""A PyTorch module with generated weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


class PaintedNetwork(nn.Module):
    """A linear layer from a plane to outputs.

    Args:
        weights: [outputs, pixels].
        is_channeled: True if inputs are [batch, channels, height, width], whose channels are averaged.
    """

    def __init__(self, weights: np.ndarray, is_channeled: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.as_tensor(weights, dtype=torch.get_default_dtype()))
        self.is_channeled = is_channeled

    def forward(self, inputs: Tensor) -> Tensor:
        plane = inputs.mean(dim=1) if self.is_channeled else inputs
        return plane.flatten(1).to(self.weights.dtype) @ self.weights.T
