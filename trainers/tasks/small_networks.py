"""Networks for the digits with the same layers, whose convolutions have more or fewer weights.

They are not built-in tasks: a config names them by `task.type=orchestray.trainers.tasks.small_networks:SmallDigits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from torch import nn

from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.digits import NUM_CLASSES, SIDE, Digits
from orchestray.trainers.tasks.thin_convolutions import Fire, TensorTrainConv2d, separable

_SQUEEZED = 4
"""Output channels of a fire module, over those between its two layers: with 8, as in the paper, digits are left two."""
_RANK = 6

CONVOLUTIONS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "plain": lambda inputs, outputs: nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
    "fire": lambda inputs, outputs: Fire(inputs, outputs, outputs // _SQUEEZED),
    "separable": separable,
    "tensor_train": lambda inputs, outputs: TensorTrainConv2d(inputs, outputs, rank=_RANK),
}
"""Convolutions by name, from numbers of input and output channels."""


class SmallDigits(Digits):
    """Digits by 3 x 3 convolutions with batch normalisation; all but the first are of one kind.

    The images are halved after the second and the third convolution. The mean over what is left of them goes to a last
    linear layer.

    Args:
        kind: "plain"; "fire" (modules of mostly 1 x 1 convolutions, of SqueezeNet); "separable" (a convolution of each
        channel, then one over the channels, of MobileNet); or "tensor_train" (reshaped kernels in factors).
        channels: channels of the convolutions, multiples of 8.
    """

    def __init__(self, kind: str = "plain", channels: Sequence[int] = (16, 32, 64)) -> None:
        if kind not in CONVOLUTIONS:
            raise TaskError(f"task.kind must be one of {', '.join(CONVOLUTIONS)}, got {kind!r}")
        if not channels or any(number < 1 or number % 8 for number in channels):
            raise TaskError(f"task.channels must be multiples of 8, got {list(channels)}")
        super().__init__(model="cnn")
        self._kind = kind
        self._channels = list(channels)

    def build_model(self) -> nn.Module:
        layers, side = _layers(CONVOLUTIONS["plain"](1, self._channels[0]), self._channels[0]), SIDE
        for inputs, outputs in pairwise(self._channels):
            layers += _layers(CONVOLUTIONS[self._kind](inputs, outputs), outputs)
            if side > 2:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        return nn.Sequential(*layers, nn.AvgPool2d(side), nn.Flatten(), nn.Linear(self._channels[-1], NUM_CLASSES))


def _layers(convolution: nn.Module, channels: int) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
