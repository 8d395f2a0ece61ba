"""Weights trained as a length times a direction, w = g v / |v| (Salimans and Kingma 2016), in any model.

Each layer's lengths depend on its weights alone, not on the samples: nothing more is sent between workers, and nothing
of other samples has to be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.model_state import ModelState

_KEY = "config: train.weight_norm"
_LENGTH, _DIRECTION = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


def normalise_weights(model: nn.Module) -> None:
    """Have fully connected and convolutional layers train the length and the direction of each output's weights.

    The model computes the same as before. Weights that are tied, or not trained, stay as they are.

    Raises:
        ConfigError: there is no such layer, one has a parametrization of its own, or weights without a direction.
    """
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | _ConvNd)]
    if own := [name for name, module in found if parametrize.is_parametrized(module)]:
        raise ConfigError(
            f"{_KEY}: the layer {own[0]!r} has a parametrization of its own, as weight_norm would be: take one of the "
            "two out"
        )
    layers = [(name, module) for name, module in found if module.weight.requires_grad and uses[id(module.weight)] == 1]
    if not layers:
        raise ConfigError(
            f"{_KEY}: the model has no fully connected or convolutional layer of its own that is trained; take it out"
        )
    for name, module in layers:
        out = 1 if isinstance(module, _ConvTransposeNd) else 0  # the dimension of the outputs
        if not torch.norm_except_dim(module.weight.detach(), 2, out).all():
            raise ConfigError(
                f"{_KEY}: the layer {name!r} begins with an output whose weights are all 0, which have no direction; "
                "draw them (train.init), or take train.weight_norm out"
            )
        weight_norm(module, dim=out)


def folded(state: ModelState) -> ModelState:
    """Return the state of the plain model: each length and direction as the weight that they make."""
    return replace(state, tensors=_folded(state.tensors))


def folded_for(model: nn.Module, state: ModelState) -> ModelState:
    """Return a state with the weights that a plain model has, where the state has their lengths and directions."""
    if not any(name.endswith(_LENGTH) for name in state.tensors):
        return state
    own = model.state_dict()
    ours = {name for name in state.tensors if name.endswith((_LENGTH, _DIRECTION)) and name not in own}
    plain = _folded({name: tensor for name, tensor in state.tensors.items() if name in ours})
    return replace(state, tensors={**{k: v for k, v in state.tensors.items() if k not in ours}, **plain})


def _folded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_length, _ = name.partition(_LENGTH)
        if is_length:
            direction = tensors[layer + _DIRECTION]
            summed = [place for place, size in enumerate(tensor.shape) if size == 1]
            norm = torch.linalg.vector_norm(direction, dim=summed, keepdim=True)
            plain[f"{layer}.weight"] = direction * (tensor / norm)
        elif not name.endswith(_DIRECTION):
            plain[name] = tensor
    return plain
