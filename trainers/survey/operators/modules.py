"""Operators as modules, for `orchestray analyse`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.operators.convolutions import in_chwn
from orchestray.trainers.survey.operators.fixed_point import FixedPointLinear
from orchestray.trainers.survey.operators.recurrent import pipelined
from orchestray.trainers.survey.operators.strassen import strassen


class Strassen(nn.Module):
    """A product of two matrices by three levels of Strassen's sums."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return strassen(a, b, 3)


class WavefrontLSTM(nn.LSTM):
    """An LSTM of four layers, 64 features and 64 units, computed as a wavefront through layers and time."""

    def __init__(self) -> None:
        super().__init__(64, 64, 4)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a plain call: inputs, no state
        return pipelined(self, x)


class LayeredLSTM(WavefrontLSTM):
    """The same network, layer after layer: that which the wavefront is compared with."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = nn.LSTM.forward(self, x)[0]
        return out


class FixedPoint(FixedPointLinear):
    """A fully connected layer of 64 features and 64 units in fixed point."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())  # rounded values have no gradient


class ChwnConvolution(nn.Module):
    """A convolution of 16 into 16 channels for inputs [channels, height, width, samples]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return in_chwn(x, self.weight)
