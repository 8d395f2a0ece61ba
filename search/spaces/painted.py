"""Networks whose weights a small network paints: HyperNEAT.

K. O. Stanley, D. B. D'Ambrosio and J. Gauci, "A Hypercube-Based Encoding for Evolving Large-Scale Neural Networks",
Artificial Life 15(2), 2009. The genome is a topology (a compositional pattern-producing network) with inputs x1, y1,
x2, y2 and the distance of the two points; its output at two places is the weight of the connection between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from orchestray.search.spaces.topology import Topology, TopologyGenome

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = ("sine", "gaussian", "sigmoid", "absolute", "linear")


class Painted(Topology):
    """A layer from a plane of inputs to the outputs, with painted weights; of any resolution by the same genome.

    Inputs of shape [height, width], [channels, height, width] (the channels are averaged) or a square number of
    features lie evenly on [-1, 1] x [-1, 1]; so do the outputs if their number is a square above 1, else they lie on a
    line. Weights are divided by the number of inputs, so that the answer does not depend on the resolution.
    """

    def __init__(self, *, threshold: float = 0.1, largest: float = 3.0) -> None:
        """
        Args:
            threshold: magnitude up to which a painted weight is no connection.
            largest: magnitude of a weight at which it is cut off.
        """
        super().__init__(inputs=5, outputs=1, activations=ACTIVATIONS, output="linear")
        self.threshold, self.largest = threshold, largest

    def weights(self, genome: TopologyGenome, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """The weights between points.

        Args:
            genome: of the painting network.
            inputs: [inputs, 2], x and y of each.
            outputs: [outputs, 2].

        Returns:
            [outputs, inputs], before they are divided by the number of inputs.
        """
        first = np.repeat(inputs[None], len(outputs), axis=0)
        second = np.repeat(outputs[:, None], len(inputs), axis=1)
        distances = np.linalg.norm(first - second, axis=2, keepdims=True)
        asked = np.concatenate([first, second, distances], axis=2).reshape(-1, 5)
        painted = self.outputs_of(genome, asked).reshape(len(outputs), len(inputs))
        beyond = np.sign(painted) * np.maximum(np.abs(painted) - self.threshold, 0.0)
        result: np.ndarray = np.clip(beyond, -self.largest, self.largest)
        return result

    def build(self, genome: TopologyGenome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        """One linear layer from the plane to the outputs."""
        from orchestray.search.spaces.painted_network import PaintedNetwork

        height, width = plane(input_shape)
        painted = self.weights(genome, grid(height, width), points(num_outputs))
        return PaintedNetwork(painted / (height * width), is_channeled=len(input_shape) == 3)


def plane(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of inputs of a shape."""
    if len(shape) == 1:
        side = isqrt(shape[0])
        return (side, side) if side * side == shape[0] else (1, shape[0])
    return shape[-2], shape[-1]


def grid(height: int, width: int) -> np.ndarray:
    """The centres of height x width pixels on [-1, 1] x [-1, 1], row by row: [pixels, 2], x and y of each."""
    ys = (2 * np.arange(height) + 1) / height - 1
    xs = (2 * np.arange(width) + 1) / width - 1
    y, x = np.meshgrid(ys, xs, indexing="ij")
    return np.stack([x.ravel(), y.ravel()], axis=1)


def points(num: int) -> np.ndarray:
    """Where so many outputs lie: [num, 2]."""
    side = isqrt(num)
    return grid(side, side) if side > 1 and side * side == num else grid(1, num)
