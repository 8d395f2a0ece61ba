"""Networks that several tasks use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def multilayer_perceptron(
    num_inputs: int, hidden: Sequence[int], num_outputs: int, *, dropout: float = 0.0, batch_norm: bool = False
) -> nn.Sequential:
    """Fully connected layers with ReLU between them, a flat sequence that can be cut anywhere."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(num_inputs, width))
        if batch_norm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, num_outputs))
