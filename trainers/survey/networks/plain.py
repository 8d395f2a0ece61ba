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
    """LeNet-5 for images [1, 32, 32]: three convolutions, two layers that average, two fully connected ones.

    The third layer reads some of the maps of the second, and those that average have a factor and an offset a map.
    The last layer, of radial basis functions with fixed centres, has no weights and is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 6, 5)
        self.s2 = _Average(6)
        self.c3 = nn.ModuleList(nn.Conv2d(len(maps), 1, 5) for maps in C3_INPUTS)
        self.s4 = _Average(16)
        self.c5 = nn.Conv2d(16, 120, 5)
        self.f6 = nn.Linear(120, 84)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.s2(self.c1(x)))
        x = torch.cat([layer(x[:, list(maps)]) for layer, maps in zip(self.c3, C3_INPUTS, strict=True)], dim=1)
        x = torch.tanh(self.s4(x))
        out: Tensor = self.f6(torch.tanh(self.c5(x)).flatten(1))
        return torch.tanh(out)


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
