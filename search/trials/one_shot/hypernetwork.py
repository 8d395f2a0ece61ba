"""A network that maps an architecture to the weights of its network (Brock et al., "SMASH", ICLR 2018, section 3.2).

The paper generates the weights of one kind of network, by a convolutional network over its memory banks. This one
generates the weights of any network that a space builds. The architecture is encoded as a code vector. Each weight is a
mixture, with the code as coefficients, of a few tensors learned for its name, cropped to its shape.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ENCODED = 128
"""Length of the encoding of an architecture."""
_CODE = 6
"""Number of tensors in a mixture, besides the first."""
_FIRST_SCALE = 0.3
"""Initial scale of these tensors, relative to the first."""


class HyperNetwork:
    """A generator of network weights. The learned tensors of a name start at the initial weights of a network."""

    def __init__(self, *, hidden: int, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """
        Args:
            hidden: units of the layer between an architecture and its code.
            seed: seed of the weights.
            dtype: dtype of the weights.
            device: device of the weights, and of the networks they are generated for; default: the CPU. Numbers are
                drawn on the CPU, so that they are the same on any device.
        """
        self._seed, self._dtype, self._device = seed, dtype, device or torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {
            "code.first": self._normal(generator, _ENCODED, hidden) / _ENCODED**0.5 * 4,
            "code.second": self._normal(generator, hidden, _CODE) / hidden**0.5,
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self._encodings: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        """Initial weights of the largest shape of each name."""

    def write(self, genome: Any, network: nn.Module) -> dict[str, Tensor]:
        """Return the weights of a network by name, differentiable with respect to the learned ones; buffers are left
        out.

        Args:
            genome: the architecture.
            network: network that the space built from it; new names and shapes start at its own weights.
        """
        code = self._code(genome)
        return {name: self._mixture(name, tensor, code) for name, tensor in network.named_parameters()}

    def _code(self, genome: Any) -> Tensor:
        """Return [1 + _CODE] coefficients: 1, then the code of the architecture."""
        hidden = torch.tanh(self._encoding(genome) @ self.parameters["code.first"])
        return torch.cat([hidden.new_ones(1), torch.tanh(hidden @ self.parameters["code.second"])])

    def expect(self, network: nn.Module) -> None:
        """Record the largest shape of each tensor, before any weights are generated.

        Smaller tensors are its first rows, columns and so on, so that what one width learns helps the others.
        """
        for name, own in network.named_parameters():
            key = _key(name, own.dim())
            known = self._largest.get(key)
            if known is None:
                self._largest[key] = own.detach()
            elif any(size > have for size, have in zip(own.shape, known.shape, strict=True)):
                shape = [max(pair) for pair in zip(own.shape, known.shape, strict=True)]
                self._largest[key] = _spread(self._generator(key), own.detach(), shape)

    def _mixture(self, name: str, own: Tensor, code: Tensor) -> Tensor:
        key = _key(name, own.dim())
        begun = self._largest.get(key, own.detach())
        if any(size > have for size, have in zip(own.shape, begun.shape, strict=True)):
            key, begun = f"{key} {'x'.join(str(size) for size in own.shape)}", own.detach()
        if key not in self.parameters:
            first = begun.to(self._dtype)
            scale = _FIRST_SCALE * float(first.std(correction=0))
            rest = scale * self._normal(self._generator(key), _CODE, *first.shape)
            self.parameters[key] = torch.cat([first[None], rest]).requires_grad_()
        window = self.parameters[key][(slice(None), *(slice(size) for size in own.shape))]
        mixed: Tensor = torch.tensordot(code, window, dims=1)
        return mixed

    def _generator(self, key: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(key.encode()) + self._seed)

    def _encoding(self, genome: Any) -> Tensor:
        """Return the sum of one vector per value in the genome and its position, [_ENCODED]."""
        parts = [f"{path}={json.dumps(value)}" for path, value in _leaves(genome)]
        for text in parts:
            if text not in self._encodings:
                generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
                self._encodings[text] = self._normal(generator, _ENCODED)
        described: Tensor = torch.stack([self._encodings[text] for text in parts]).sum(0) / len(parts) ** 0.5
        return described

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace the learned weights."""
        self.parameters = {
            name: tensor.detach().to(self._device, copy=True).requires_grad_() for name, tensor in parameters.items()
        }

    def _normal(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=self._dtype).to(self._device)


def _key(name: str, dimensions: int) -> str:
    return f"{name} {dimensions}d"


def _spread(generator: torch.Generator, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape, drawn with the mean and standard deviation of `values`."""
    drawn = torch.randn(list(shape), generator=generator, dtype=values.dtype).to(values.device)
    spread: Tensor = values.mean() + values.std(correction=0) * drawn
    return spread


def _leaves(genome: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(genome, Mapping):
        for name, value in genome.items():
            yield from _leaves(value, f"{path}.{name}")
    elif isinstance(genome, list | tuple):
        for index, value in enumerate(genome):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path, genome
