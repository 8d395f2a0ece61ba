"""Layers that several tasks use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def multilayer_perceptron(
    num_inputs: int, hidden: Sequence[int], num_outputs: int, *, dropout: float = 0.0, batch_norm: bool = False
) -> nn.Sequential:
    """Return fully connected layers with ReLU between them: a flat sequence that can be cut anywhere.

    Args:
        num_inputs: inputs of the first layer.
        hidden: widths of the hidden layers.
        num_outputs: outputs of the last layer.
        dropout: probability of dropping a unit of a hidden layer.
        batch_norm: True for batch normalisation before each ReLU.
    """
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


def convolution(num_inputs: int, num_outputs: int, side: int) -> list[nn.Module]:
    """Return a convolution of an odd `side` that keeps the images' size, and ReLU."""
    return [nn.Conv2d(num_inputs, num_outputs, side, padding=side // 2), nn.ReLU()]


def initialise_for_relu(model: nn.Module) -> None:
    """Draw the weights in place with which deep ReLU networks learn from the start.

    He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
