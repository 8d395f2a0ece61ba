"""Work and depth of layers by closed forms: the survey's Tables 4 and 6.

Depths leave out constants, as the tables do; logarithms are rounded up, each one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orchestray.trainers.analysis.cost import levels


class WorkDepth(NamedTuple):
    """Work W, in products or operations as the row of the table has it, and depth D."""

    work: int
    depth: int


@dataclass(frozen=True)
class ConvolutionShape:
    """The sizes of a convolution with stride 1.

    Args:
        samples: samples N.
        in_channels, out_channels: channels C_in and C_out.
        height, width: size H x W of the inputs, with their padding.
        kernel: size (K_y, K_x) of the kernels.
    """

    samples: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: tuple[int, int]

    @property
    def out_height(self) -> int:
        """Height H' of the outputs."""
        return self.height - self.kernel[0] + 1

    @property
    def out_width(self) -> int:
        """Width W' of the outputs."""
        return self.width - self.kernel[1] + 1

    @property
    def num_outputs(self) -> int:
        """Number of output values, N C_out H' W'."""
        return self.samples * self.out_channels * self.out_height * self.out_width

    @property
    def num_weights(self) -> int:
        """Number of weights, C_out C_in K_y K_x."""
        return self.out_channels * self.in_channels * self.kernel[0] * self.kernel[1]


# -- Table 4 -----------------------------------------------------------------------------------------------------------


def activation(values: int) -> WorkDepth:
    """Return the cost of an element-wise activation of N C H W values, forward or backward."""
    return WorkDepth(values, 1)


def fully_connected(samples: int, in_features: int, out_features: int) -> dict[str, WorkDepth]:
    """Return the cost of the outputs `y`, and of the gradients `dw` and `dx`, of a fully connected layer."""
    work = samples * in_features * out_features
    sums = {"y": in_features, "dw": samples, "dx": out_features}
    return {name: WorkDepth(work, levels(size)) for name, size in sums.items()}


def convolution(shape: ConvolutionShape) -> dict[str, WorkDepth]:
    """Return the cost of the outputs `y`, and of the gradients `dw` and `dx`, of a direct convolution.

    The table prints one depth for all three, and H W instead of H' W' for `dx`. These are the depths of the sums that
    each needs, and the work of a backward pass that leaves out products with padding.
    """
    work = shape.num_outputs * shape.in_channels * shape.kernel[0] * shape.kernel[1]
    of_kernel = levels(shape.kernel[0]) + levels(shape.kernel[1])
    return {
        "y": WorkDepth(work, levels(shape.in_channels) + of_kernel),
        "dw": WorkDepth(work, levels(shape.samples) + levels(shape.out_height) + levels(shape.out_width)),
        "dx": WorkDepth(work, levels(shape.out_channels) + of_kernel),
    }


def pooling(values: int, kernel: tuple[int, int]) -> dict[str, WorkDepth]:
    """Return the cost of pooling to `values` outputs, and of the gradient `dx`."""
    depth = levels(kernel[0]) + levels(kernel[1])
    return {"y": WorkDepth(values * (kernel[0] * kernel[1] - 1), depth), "dx": WorkDepth(values, 1)}


# -- Table 6 -----------------------------------------------------------------------------------------------------------


def direct(shape: ConvolutionShape) -> WorkDepth:
    """Return the products and the depth of a convolution by its definition; those of im2col are the same."""
    return convolution(shape)["y"]


def fourier(shape: ConvolutionShape, *, constant: float = 1.0) -> WorkDepth:
    """Return the cost of a convolution in the frequency domain.

    Args:
        shape: sizes of the convolution.
        constant: operations of a transform of n values, over n log2 n; the table calls it c.
    """
    area = shape.height * shape.width
    n, c_in, c_out = shape.samples, shape.in_channels, shape.out_channels
    transforms = constant * area * levels(area) * (c_out * c_in + n * c_in + n * c_out)
    return WorkDepth(round(transforms) + area * n * c_in * c_out, 2 * levels(area) + levels(c_in))


def winograd(shape: ConvolutionShape, outputs: int) -> WorkDepth:
    """Return the products of F(m x m, r x r) with square kernels, without its transforms, and the depth.

    The table prints a tile of m - r + 1 inputs, and C_out C_in P products for P tiles. A tile has m + r - 1 inputs
    (Lavin & Gray 2016), and as many products in each of its places.

    Args:
        shape: sizes of the convolution.
        outputs: side m of a tile's outputs.
    """
    r = shape.kernel[0]
    tile = outputs + r - 1
    tiles = shape.samples * -(-shape.out_height // outputs) * -(-shape.out_width // outputs)
    depth = 2 * levels(r) + 4 * levels(tile) + levels(shape.in_channels)
    return WorkDepth(tile * tile * shape.out_channels * shape.in_channels * tiles, depth)
