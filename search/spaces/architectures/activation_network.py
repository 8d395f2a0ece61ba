"""A network of single nodes as a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from orchestray.search.spaces.architectures.activation import Layers

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda values: torch.sigmoid(4.9 * values),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sine": torch.sin,
    "gaussian": lambda values: torch.exp(-(values**2)),
    "absolute": torch.abs,
    "linear": lambda values: values,
}


class LayersNetwork(nn.Module):
    """A module from inputs [batch, ...] to outputs [batch, outputs], with one trainable weight per connection."""

    source: Tensor
    target: Tensor

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        connected = torch.as_tensor(layers.connected)
        self.register_buffer("source", connected[:, 0].clone(), persistent=False)
        self.register_buffer("target", connected[:, 1].clone(), persistent=False)
        weights = layers.weights[layers.connected[:, 0], layers.connected[:, 1]]
        self.weights = nn.Parameter(torch.as_tensor(weights, dtype=torch.get_default_dtype()))

    def forward(self, inputs: Tensor) -> Tensor:
        num = len(self.layers.numbers)
        weights = self.weights.new_zeros(num, num).index_put((self.source, self.target), self.weights)
        flat = inputs.flatten(1).to(self.weights.dtype)
        values = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
        for start, end in self.layers.layers:
            sums = values @ weights[:start, start:end]
            columns = [
                _ACTIVATIONS[self.layers.kinds[start + column]](sums[:, column : column + 1])
                for column in range(end - start)
            ]
            values = torch.cat([values, *columns], dim=1)
        return values[:, list(self.layers.outputs)]
