"""AlexNet's architecture for images of 8 x 8 pixels.

Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012, section
3.5 and figure 2. Two towers of convolutions exchange outputs before the third layer and after the fifth; fully
connected layers follow. Strides are 1, channels are a quarter, and response normalisation is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.tasks.layers import convolution, initialise_for_relu

TOWER_CHANNELS = (12, 32, 48, 48, 32)
"""Channels of the five convolutions of a tower, a quarter of the paper's."""
_NUM_TOWERS = 2


def alexnet(hidden: Sequence[int], num_classes: int, *, dropout: float = 0.0) -> nn.Sequential:
    """Return a network from images [samples, 1, 8, 8] to logits: a flat sequence that can be cut anywhere.

    Args:
        hidden: widths of the fully connected layers before the last one; AlexNet has two.
        num_classes: number of logits.
        dropout: dropout probability before each of those layers; AlexNet has 0.5.
    """
    first, second, third, fourth, fifth = TOWER_CHANNELS
    layers: list[nn.Module] = [
        # Parts that a tower computes by itself; each `Branches` ends by concatenating the towers.
        Branches([_tower((1, first, second), pool_after=(0, 1)) for _ in range(_NUM_TOWERS)]),
        Branches([_tower((_NUM_TOWERS * second, third, fourth, fifth), pool_after=(2,)) for _ in range(_NUM_TOWERS)]),
        nn.Flatten(),
    ]
    width = _NUM_TOWERS * fifth  # three poolings leave one pixel
    for number in hidden:
        if dropout:
            layers.append(nn.Dropout(dropout))
        layers += [nn.Linear(width, number), nn.ReLU()]
        width = number
    model = nn.Sequential(*layers, nn.Linear(width, num_classes))
    initialise_for_relu(model)
    return model


def _tower(channels: Sequence[int], pool_after: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(channels)):
        layers += convolution(before, after, 3)
        if index in pool_after:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)
