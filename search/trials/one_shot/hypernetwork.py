"""A network that maps an architecture to the weights of its network (Brock et al., "SMASH", ICLR 2018, section 3.2).

The paper writes the weights of one kind of network, by a convolutional network over its memory banks. This one writes
those of any network that a space builds: the architecture becomes a code, and each tensor of weights is a mixture, by
the code, of a few tensors that are learned for its name and shape.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ENCODED = 128
"""Length of the description of an architecture."""
_CODE = 6
"""Tensors that each one is a mixture of, beside the first."""
_FIRST_SCALE = 0.3
"""Of the others when they are made, against the first."""


class HyperNetwork:
    """Writes weights. What it has learned for a name and shape begins as the network's own initial weights."""

    def __init__(self, *, hidden: int, seed: int, dtype: torch.dtype) -> None:
        """
        Args:
            hidden: units of the layer between an architecture and its code.
            seed: of the weights.
            dtype: of the weights.
        """
        self._seed, self._dtype = seed, dtype
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {
            "code.first": _normal(generator, dtype, _ENCODED, hidden) / _ENCODED**0.5 * 4,
            "code.second": _normal(generator, dtype, hidden, _CODE) / hidden**0.5,
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self._encodings: dict[str, Tensor] = {}

    def write(self, genome: Any, network: nn.Module) -> dict[str, Tensor]:
        """The weights of a network, by name, differentiable in what is learned; buffers are not written.

        Args:
            genome: the architecture.
            network: what the space built of it; its own weights are where new names and shapes begin.
        """
        code = self._code(genome)
        return {name: self._mixture(name, tensor, code) for name, tensor in network.named_parameters()}

    def _code(self, genome: Any) -> Tensor:
        """[1 + _CODE]: 1, then what the architecture says."""
        hidden = torch.tanh(self._encoding(genome) @ self.parameters["code.first"])
        return torch.cat([hidden.new_ones(1), torch.tanh(hidden @ self.parameters["code.second"])])

    def _mixture(self, name: str, own: Tensor, code: Tensor) -> Tensor:
        key = f"{name} {'x'.join(str(size) for size in own.shape)}"
        if key not in self.parameters:
            generator = torch.Generator().manual_seed((zlib.crc32(key.encode()) + self._seed) % 2**63)
            first = own.detach().to(self._dtype)
            scale = _FIRST_SCALE * float(first.std(correction=0))
            rest = scale * _normal(generator, self._dtype, _CODE, *own.shape)
            self.parameters[key] = torch.cat([first[None], rest]).requires_grad_()
        return torch.tensordot(code, self.parameters[key], dims=1)

    def _encoding(self, genome: Any) -> Tensor:
        """A sum of vectors, one for each value in the genome by where it stands, [_ENCODED]."""
        parts = [f"{path}={json.dumps(value)}" for path, value in _leaves(genome)]
        for text in parts:
            if text not in self._encodings:
                generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
                self._encodings[text] = _normal(generator, self._dtype, _ENCODED)
        return torch.stack([self._encodings[text] for text in parts]).sum(0) / len(parts) ** 0.5

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Take other weights."""
        self.parameters = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}


def _leaves(genome: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(genome, Mapping):
        for name, value in genome.items():
            yield from _leaves(value, f"{path}.{name}")
    elif isinstance(genome, list | tuple):
        for index, value in enumerate(genome):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path, genome


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype)
