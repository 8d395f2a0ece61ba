"""A convolutional network that maps an architecture to weights: the HyperNet of SMASH.

Brock et al., "SMASH: One-Shot Model Architecture Search through HyperNetworks", ICLR 2018, section 3.2. The
architecture is a tensor, whose cells describe the op that uses them (`spaces.architectures.memory_bank`). Convolutions
over it give k numbers for each cell: a patch of the weight of the op's 1 x 1 convolution. Here k is N^2 for units of N
channels; the paper's is D N^2 for patches of D N outputs. A generated weight is divided by its Euclidean norm. All
other weights are learned once, at their largest, and cut to the shape that an architecture needs (section 3.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.search.spaces.architectures.memory_bank import MemoryBank

_LAYERS = 3
"""Convolutions of 3 x 3 before the last of 1 x 1. Each takes the outputs of all before it, as in DenseNets."""


class HyperNet(nn.Module):
    """A generator of the weights of all networks of a space of memory banks, with those that they share."""

    def __init__(
        self, space: MemoryBank, input_shape: Sequence[int], num_outputs: int, *, hidden: int, seed: int
    ) -> None:
        """
        Args:
            space: space of the networks.
            input_shape: shape of one sample.
            num_outputs: width of the networks' final layer.
            hidden: channels of each convolution over the code.
            seed: seed of the initial weights.
        """
        super().__init__()
        self.space = space
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(
                _convolution(space.num_features + index * hidden, hidden, 3) for index in range(_LAYERS)
            )
            self.patches = _convolution(space.num_features + _LAYERS * hidden, space.unit**2, 1)
            largest = space.largest(input_shape, num_outputs)
        self.shared = nn.ParameterDict({_key(name): parameter for name, parameter in largest.named_parameters()})

    def forward(self, cells: Tensor) -> Tensor:
        """Return the patches [k, rows, columns] of a code [features, rows, columns]."""
        seen = cells[None]
        for layer in self.layers:
            seen = torch.cat([seen, functional.leaky_relu(layer(seen), 0.1)], dim=1)
        patches: Tensor = self.patches(seen)[0]
        return patches

    def write(self, genome: Genome, network: nn.Module) -> dict[str, Tensor]:
        """Return the weights of a network by name, differentiable; buffers are left out.

        Args:
            genome: the architecture.
            network: network that the space built from it, for names and shapes.
        """
        code, shared = self.space.code(genome), self.space.shared(genome)
        patches = self(torch.from_numpy(code.cells).to(self.patches.weight))
        generated = {one.name: patches[:, one.rows][:, :, list(one.columns)] for one in code.generated}
        written = {}
        for name, own in network.named_parameters():
            if name in generated:
                written[name] = _assembled(generated[name], own.shape)
            else:
                step, _, rest = name.removeprefix("steps.").partition(".")
                known = shared[step]
                written[name] = _cut(self.shared[_key(f"{known.name}.{rest}")], own.shape, known.inputs)
        return written


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
    """Return a convolution without bias: a weight is made of what the code says, and of nothing else."""
    made = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight)
    return made


def _key(name: str) -> str:
    """Return a name of a weight without the dots, which torch keeps for itself."""
    return name.replace(".", "/")


def _assembled(patches: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the weight [outputs, inputs, 1, 1] of norm 1 that patches [k, rows, columns] make up."""
    unit = math.isqrt(patches.shape[0])
    apart = patches.reshape(unit, unit, *patches.shape[1:])  # [outputs, inputs] of a patch, then rows and columns
    weight = apart.permute(2, 0, 3, 1).reshape(shape)
    normed: Tensor = weight / weight.norm().clamp(min=1e-12)
    return normed


def _cut(largest: Tensor, shape: Sequence[int], inputs: Sequence[int] | None) -> Tensor:
    """Return the part of a shared weight: its first outputs, the given or first inputs, the middle of its kernel."""
    cut = largest[: shape[0]]
    if len(shape) > 1:
        cut = cut[:, : shape[1]] if inputs is None else cut[:, list(inputs)]
    for dim in range(2, len(shape)):
        cut = cut.narrow(dim, (cut.shape[dim] - shape[dim]) // 2, shape[dim])
    return cut
