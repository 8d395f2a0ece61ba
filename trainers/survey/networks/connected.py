"""Networks whose layers have several ways through: GoogLeNet, ResNet, DenseNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# -- GoogLeNet (Szegedy et al. 2015) -----------------------------------------------------------------------------------

_INCEPTIONS: Sequence[Sequence[int]] = (
    *((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64), ()),
    *((480, 192, 96, 208, 16, 48, 64), (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64)),
    *((512, 112, 144, 288, 32, 64, 64), (528, 256, 160, 320, 32, 128, 128), ()),
    *((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
)
"""Sizes of the inception modules (Table 1): inputs, 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pooled; (): pooling."""


class Inception(nn.Module):
    """Four ways side by side: 1x1, 3x3 and 5x5 convolutions, and pooling."""

    def __init__(self, inputs: int, ones: int, threes_in: int, threes: int, fives_in: int, fives: int, pooled: int):
        super().__init__()
        self.ways = nn.ModuleList(
            [
                _rectified(inputs, ones, 1),
                nn.Sequential(_rectified(inputs, threes_in, 1), _rectified(threes_in, threes, 3)),
                nn.Sequential(_rectified(inputs, fives_in, 1), _rectified(fives_in, fives, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _rectified(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], dim=1)


def googlenet(num_classes: int = 1000) -> nn.Sequential:
    """Return GoogLeNet for images [3, 224, 224], without the two classifiers that only training has."""
    layers: list[nn.Module] = [_rectified(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [nn.LocalResponseNorm(5), _rectified(64, 64, 1), _rectified(64, 192, 3), nn.LocalResponseNorm(5)]
    for sizes in ((), *_INCEPTIONS):
        layers.append(Inception(*sizes) if sizes else nn.MaxPool2d(3, 2, ceil_mode=True))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, num_classes)]
    return nn.Sequential(*layers)


def _rectified(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), nn.ReLU())


# -- ResNet (He et al. 2016) -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Layers whose outputs are added to their inputs.

    Args:
        inputs, outputs: channels.
        stride: stride of the first convolution.
        inner: channels between 1x1 convolutions (a bottleneck); None: two 3x3 convolutions.
        projects: True to bring inputs to the outputs' size by a convolution; False: by leaving out and adding zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, inner: int | None, *, projects: bool) -> None:
        super().__init__()
        if inner is None:
            parts = [_normalised(inputs, outputs, 3, stride), nn.ReLU(), _normalised(outputs, outputs, 3)]
        else:
            parts = [_normalised(inputs, inner, 1, stride), nn.ReLU(), _normalised(inner, inner, 3), nn.ReLU()]
            parts.append(_normalised(inner, outputs, 1))
        self.layers = nn.Sequential(*parts)
        changes = inputs != outputs or stride != 1
        self.short: nn.Module = _normalised(inputs, outputs, 1, stride) if changes and projects else nn.Identity()
        self._stride, self._missing = (stride, outputs - inputs) if changes and not projects else (1, 0)

    def forward(self, x: Tensor) -> Tensor:
        short = self.short(x)[:, :, :: self._stride, :: self._stride]
        return torch.relu(self.layers(x) + nn.functional.pad(short, (0, 0, 0, 0, 0, self._missing)))


_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(num_layers: int = 152, num_classes: int = 1000) -> nn.Sequential:
    """Return a ResNet of 18, 34, 50, 101 or 152 layers for images [3, 224, 224] (Table 1)."""
    is_deep = num_layers >= 50
    channels = 64
    layers: list[nn.Module] = [_normalised(3, channels, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    for stage, count in enumerate(_BLOCKS[num_layers]):
        inner = 64 * 2**stage
        outputs = 4 * inner if is_deep else inner
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Residual(channels, outputs, stride, inner if is_deep else None, projects=True))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def resnet_for_cifar(num_layers: int = 110, num_classes: int = 10) -> nn.Sequential:
    """Return a ResNet of 6 n + 2 layers for images [3, 32, 32] (section 4.2), with 16, 32 and 64 channels."""
    channels = 16
    layers: list[nn.Module] = [_normalised(3, channels, 3), nn.ReLU()]
    for stage in range(3):
        for number in range((num_layers - 2) // 6):
            stride, outputs = (2 if stage and not number else 1), 16 * 2**stage
            layers.append(Residual(channels, outputs, stride, None, projects=False))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _normalised(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


# -- DenseNet (Huang et al. 2017) --------------------------------------------------------------------------------------


class Dense(nn.Module):
    """A layer that passes on its inputs, and as many new maps as the network grows by."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth, 1, bias=False)),
            *(nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], dim=1)


def densenet_for_cifar(num_layers: int = 250, growth: int = 24, num_classes: int = 10) -> nn.Sequential:
    """Return a DenseNet-BC for images [3, 32, 32]: three blocks, each halving the maps after it.

    Args:
        num_layers: layers with weights, 6 n + 4.
        growth: new maps of a layer.
        num_classes: outputs.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        for _ in range((num_layers - 4) // 6):
            layers.append(Dense(channels, growth))
            channels += growth
        if block < 2:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))
