"""A small Inception network for images of 8 x 8 pixels.

Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 4 and figure 2(b): blocks of four independent
branches, which different workers can compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from orchestray.platform.data.even_split import split_evenly
from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.tasks.layers import convolution, initialise_for_relu

_NUM_BRANCHES = 4


def inception(channels: Sequence[int], num_classes: int, *, side: int, dropout: float = 0.0) -> nn.Sequential:
    """Return a network from images [samples, 1, side, side] to logits: a flat sequence that can be cut anywhere.

    Args:
        channels: output channels of each block, at least `_NUM_BRANCHES`; the convolution before the first block has
        the same channels as that block.
        num_classes: number of logits.
        side: side of the images; each block but the last halves it while it is above 2.
        dropout: dropout probability before the last layer.
    """
    before = channels[0]
    layers: list[nn.Module] = [*convolution(1, before, 3)]
    for index, number in enumerate(channels):
        layers.append(inception_block(before, number))
        before = number
        if side > 2 and index < len(channels) - 1:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    layers += [nn.AvgPool2d(side), nn.Flatten()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    model = nn.Sequential(*layers, nn.Linear(before, num_classes))
    initialise_for_relu(model)
    return model


def inception_block(num_inputs: int, num_outputs: int) -> Branches:
    """Return branches of 1 x 1, 3 x 3 and 5 x 5 convolutions and a pooling, each with a quarter of the output channels.

    Before the larger convolutions, a 1 x 1 convolution halves the number of channels.
    """
    one, three, five, pooled = (stop - start for start, stop in split_evenly(num_outputs, _NUM_BRANCHES))
    narrow = max(1, num_inputs // 2)
    return Branches(
        [
            nn.Sequential(*convolution(num_inputs, one, 1)),
            nn.Sequential(*convolution(num_inputs, narrow, 1), *convolution(narrow, three, 3)),
            nn.Sequential(*convolution(num_inputs, narrow, 1), *convolution(narrow, five, 5)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *convolution(num_inputs, pooled, 1)),
        ]
    )
