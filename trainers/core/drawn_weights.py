"""Fresh weights of a model from a distribution that keeps the size of its signals, by `torch.nn.init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from orchestray.platform.errors import ConfigError

DISTRIBUTIONS: Mapping[str, Callable[[Tensor], Any]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "kaiming_normal": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
}
"""Glorot and Bengio 2010, section 4.2.1: variance 2 / (fan in + fan out); He et al. 2015: 2 / fan in; Saxe et al."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@torch.no_grad()
def draw_weights(model: nn.Module, distribution: str, gain: float = 1.0) -> list[Tensor]:
    """Draw the weights of a model's layers, in place, by the global generator; the biases of these layers become zero.

    A layer is a module with a weight of two or more dimensions. The gates of a recurrent layer are drawn one by one.
    Embeddings, norms and parameters that are not trained stay as they are.

    Args:
        model: the model.
        distribution: a name of `DISTRIBUTIONS`.
        gain: factor on the weights.

    Returns:
        The weights that were drawn.

    Raises:
        ConfigError: the model has no such layer.
    """
    draw, drawn = DISTRIBUTIONS[distribution], dict[int, Tensor]()
    for module in model.modules():
        if isinstance(module, _TABLES):
            continue
        weights = [weight for weight in _weights(module) if id(weight) not in drawn]
        for weight in weights:
            drawn[id(weight)] = weight  # a tied weight is drawn once
            for part in _gates(module, weight):
                draw(part)
                part.mul_(gain)
        if weights:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and "bias" in name:
                    parameter.zero_()
    if not drawn:
        raise ConfigError(
            "config: train.init: the model has no layer whose weights could be drawn: none has a trained parameter "
            "called weight of two or more dimensions. Take train.init out."
        )
    return [*drawn.values()]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    named = dict(module._parameters)
    if is_parametrized(module):  # as a quantized layer, which computes with what is made of the weight that is trained
        lists = cast("nn.ModuleDict", module.parametrizations)
        named |= {name: each._parameters.get("original") for name, each in lists.items()}
    for name, parameter in named.items():
        is_trained = parameter is not None and parameter.requires_grad and parameter.is_floating_point()
        if parameter is not None and is_trained and "weight" in name and parameter.dim() > 1:
            yield parameter


def _gates(module: nn.Module, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a weight that are matrices of their own: the gates of a recurrent layer."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and len(weight) % module.hidden_size == 0:
        return torch.split(weight, module.hidden_size)
    return (weight,)
