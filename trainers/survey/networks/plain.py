"""LeNet-5 (LeCun et al. 1998) and AlexNet (Krizhevsky et al. 2012): layers one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

C3_INPUTS = (
    *((0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (0, 4, 5), (0, 1, 5)),
    *((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (0, 3, 4, 5), (0, 1, 4, 5), (0, 1, 2, 5)),
    *((0, 1, 3, 4), (1, 2, 4, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)),
)
"""Maps that each map of the third layer reads (LeCun et al. 1998, Table I)."""


class LeNet5(nn.Module):
    """LeNet-5 for images [1, 32, 32]: seven layers, which return the distance to each of ten classes, the least wins.

    Three convolutions, two layers that average, a fully connected one, and one of radial basis functions. The third
    layer reads some of the maps of the second; those that average have a factor and an offset a map. The centres of the
    last are fixed: a picture of 7 x 12 for each digit, as a display of seven segments shows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 6, 5)
        self.s2 = _Average(6)
        self.c3 = nn.ModuleList(nn.Conv2d(len(maps), 1, 5) for maps in C3_INPUTS)
        self.s4 = _Average(16)
        self.c5 = nn.Conv2d(16, 120, 5)
        self.f6 = nn.Linear(120, 84)
        self.output = _Radial()

    def forward(self, x: Tensor) -> Tensor:
        x = _squashed(self.s2(self.c1(x)))
        x = torch.cat([layer(x[:, list(maps)]) for layer, maps in zip(self.c3, C3_INPUTS, strict=True)], dim=1)
        x = _squashed(self.s4(x))
        x = self.f6(_squashed(self.c5(x)).flatten(1))
        out: Tensor = self.output(_squashed(x))
        return out


def _squashed(x: Tensor) -> Tensor:
    """Return the scaled tanh of LeNet-5, whose value at 1 is 1 (LeCun et al. 1998, appendix A)."""
    return 1.7159 * torch.tanh(2 / 3 * x)


class _Radial(nn.Module):
    """A layer of radial basis functions: squared distances to ten pictures of -1 and 1 (LeCun et al. 1998, II.B)."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.stack([_picture(lit).flatten() for lit in _LIT]))

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, None] - self.centres
        return (apart * apart).sum(2)


_LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
"""Segments that show each digit."""


def _picture(lit: str) -> Tensor:
    """Return a digit as a picture [12, 7], 1 where one of its segments is."""
    picture = -torch.ones(12, 7)
    for name, rows, columns in (
        *(("a", (0, 2), (0, 7)), ("b", (0, 7), (5, 7)), ("c", (5, 12), (5, 7)), ("d", (10, 12), (0, 7))),
        *(("e", (5, 12), (0, 2)), ("f", (0, 7), (0, 2)), ("g", (5, 7), (0, 7))),
    ):
        if name in lit:
            picture[slice(*rows), slice(*columns)] = 1.0
    return picture


class _Average(nn.Module):
    """A layer that averages squares of four, with a factor and an offset for each map."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(maps, 1, 1))
        self.offset = nn.Parameter(torch.zeros(maps, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * nn.functional.avg_pool2d(x, 2) + self.offset


def alexnet(num_classes: int = 1000) -> nn.Sequential:
    """Return AlexNet for images [3, 227, 227], with the halves of the second, fourth and fifth layer apart."""
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()),
        nn.Linear(4096, num_classes),
    )
