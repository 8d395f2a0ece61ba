"""What the built-in models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def multilayer_perceptron(
    num_inputs: int, hidden: Sequence[int], num_outputs: int, *, batch_norm: bool = False, dropout: float = 0.0
) -> nn.Sequential:
    """Linear layers with ReLU between them: input `[batch, num_inputs]`, output `[batch, num_outputs]`."""
    layers: list[nn.Module] = []
    width = num_inputs
    for size in hidden:
        layers.append(nn.Linear(width, size))
        if batch_norm:
            layers.append(nn.BatchNorm1d(size))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    layers.append(nn.Linear(width, num_outputs))
    return nn.Sequential(*layers)
