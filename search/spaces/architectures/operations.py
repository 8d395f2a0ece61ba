"""The PyTorch modules for the steps of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
"""Shape of one sample: [channels, height, width] or [features]."""


class Add(nn.Module):
    """A module that adds its inputs, all of one shape."""

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        for value in inputs[1:]:
            total = total + value
        return total


class Concat(nn.Module):
    """A module that concatenates its inputs along the channels."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, dim=1)


class GlobalAverage(nn.Module):
    """A module that averages over height and width: [samples, channels]."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(dim=(2, 3))


def build(
    kind: str, arguments: Mapping[str, Any], shapes: Sequence[Shape], num_outputs: int
) -> tuple[nn.Module, Shape]:
    """Return the module of a step, and the shape of its output.

    Args:
        kind: kind of the step.
        arguments: arguments of the step.
        shapes: shapes of the step's inputs.
        num_outputs: width of the network's final layer.
    """
    if kind == "head":
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shapes[0]), num_outputs)), (num_outputs,)
    return _KINDS[kind](shapes, **arguments)


def _conv(
    shapes: Sequence[Shape], channels: int, kernel: int, stride: int = 1, dilation: int = 1, norm: bool = True
) -> tuple[nn.Module, Shape]:
    """Return convolution, batch normalisation and ReLU."""
    before = shapes[0][0]
    padding = dilation * (kernel // 2)
    made: list[nn.Module] = [
        nn.Conv2d(before, channels, kernel, stride, padding, dilation=dilation, bias=not norm),
        *([nn.BatchNorm2d(channels)] if norm else []),
        nn.ReLU(),
    ]
    return nn.Sequential(*made), _strided(shapes[0], stride, channels)


def _separable(
    shapes: Sequence[Shape], channels: int, kernel: int, stride: int = 1, dilation: int = 1
) -> tuple[nn.Module, Shape]:
    """Return a depthwise convolution, a 1 x 1 convolution, batch normalisation and ReLU."""
    before = shapes[0][0]
    padding = dilation * (kernel // 2)
    made = nn.Sequential(
        nn.Conv2d(before, before, kernel, stride, padding, dilation=dilation, groups=before, bias=False),
        nn.Conv2d(before, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )
    return made, _strided(shapes[0], stride, channels)


def _depthwise(shapes: Sequence[Shape], kernel: int, stride: int = 1) -> tuple[nn.Module, Shape]:
    """Return a depthwise convolution, batch normalisation and ReLU."""
    channels = shapes[0][0]
    made = nn.Sequential(
        nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )
    return made, _strided(shapes[0], stride)


def _fit(shapes: Sequence[Shape], channels: int, stride: int = 1) -> tuple[nn.Module, Shape]:
    """Return a 1 x 1 convolution to a number of channels and size, and batch normalisation."""
    made = nn.Sequential(nn.Conv2d(shapes[0][0], channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
    return made, _strided(shapes[0], stride, channels)


def _max_pool(shapes: Sequence[Shape], kernel: int, stride: int = 1) -> tuple[nn.Module, Shape]:
    return nn.MaxPool2d(kernel, stride, kernel // 2), _strided(shapes[0], stride)


def _average_pool(shapes: Sequence[Shape], kernel: int, stride: int = 1) -> tuple[nn.Module, Shape]:
    made = nn.AvgPool2d(kernel, stride, kernel // 2, count_include_pad=False)
    return made, _strided(shapes[0], stride)


def _dense(shapes: Sequence[Shape], width: int, norm: bool = False) -> tuple[nn.Module, Shape]:
    """Return flattening, a linear layer and ReLU."""
    normal = [nn.BatchNorm1d(width)] if norm else []
    linear = nn.Linear(prod(shapes[0]), width, bias=not norm)
    return nn.Sequential(nn.Flatten(), linear, *normal, nn.ReLU()), (width,)


def _norm(shapes: Sequence[Shape]) -> tuple[nn.Module, Shape]:
    kind = nn.BatchNorm1d if len(shapes[0]) == 1 else nn.BatchNorm2d
    return kind(shapes[0][0]), shapes[0]


def _dropout(shapes: Sequence[Shape], rate: float) -> tuple[nn.Module, Shape]:
    return nn.Dropout(rate), shapes[0]


def _relu(shapes: Sequence[Shape]) -> tuple[nn.Module, Shape]:
    return nn.ReLU(), shapes[0]


def _add(shapes: Sequence[Shape]) -> tuple[nn.Module, Shape]:
    return Add(), shapes[0]


def _concat(shapes: Sequence[Shape]) -> tuple[nn.Module, Shape]:
    return Concat(), (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _global_average(shapes: Sequence[Shape]) -> tuple[nn.Module, Shape]:
    return GlobalAverage(), shapes[0][:1]


def _strided(shape: Shape, stride: int, channels: int | None = None) -> Shape:
    """Return the shape after a stride: with the padding used here, it divides height and width, rounding up."""
    before, height, width = shape
    return (before if channels is None else channels, -(-height // stride), -(-width // stride))


_KINDS: Mapping[str, Callable[..., tuple[nn.Module, Shape]]] = {
    "conv": _conv,
    "separable": _separable,
    "depthwise": _depthwise,
    "fit": _fit,
    "max_pool": _max_pool,
    "average_pool": _average_pool,
    "dense": _dense,
    "norm": _norm,
    "dropout": _dropout,
    "relu": _relu,
    "add": _add,
    "concat": _concat,
    "global_average": _global_average,
}
