"""The layers of a model that compute with few bits, and how their tensors are made to pass through a scheme.

A weight is parametrized (`torch.nn.utils.parametrize`): the layer computes with the quantized values, and the real ones
are the parameter that the optimizer, checkpoints and exchanges see, as `LAYER.parametrizations.weight.original`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from orchestray.platform.errors import ConfigError
from orchestray.trainers.few_bits.base import Scheme
from orchestray.trainers.few_bits.registry import QUANTIZATIONS

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KEY = "config: train.quantize"
_WEIGHT = "parametrizations.weight.original"


def make_scheme(type: str, **arguments: Any) -> Scheme:  # noqa: A002 - the config's key
    """Return the scheme of a section `train.quantize`, from its keys without `ends`."""
    made: Scheme = QUANTIZATIONS.find(type)(**arguments)
    return made


def quantize_layers(model: nn.Module, section: Mapping[str, Any]) -> nn.Module:
    """Make the linear and convolutional layers of a model compute with few bits, and return the model.

    Layers count in the order of `named_modules`; one of a subclass of torch's own, as in attention, stays as it is.

    Args:
        model: changed in place.
        section: keys of `train.quantize`.

    Raises:
        ConfigError: the model has no layer to quantize.
    """
    arguments = dict(section)
    ends = arguments.pop("ends")
    scheme = make_scheme(**arguments)
    layers = [module for module in model.modules() if type(module) in _KINDS]
    chosen = layers[1:-1] if ends == "float" else layers
    if not chosen:
        wanted = "besides its first and last one; set ends: quantized" if layers else "(Linear, Conv1d, Conv2d, Conv3d)"
        raise ConfigError(f"{_KEY}: the model has no layer to quantize {wanted}, or take train.quantize out")
    scheme.prepare(model)
    for layer in chosen:
        is_first = layer is layers[0]
        _quantize(layer, scheme, with_inputs=scheme.quantizes_data or not is_first)
    return model


def _quantize(layer: nn.Module, scheme: Scheme, *, with_inputs: bool) -> None:
    # Without a call of the module to check it: in training that would count as a pass.
    register_parametrization(layer, "weight", scheme.weights(), unsafe=True)
    inputs = scheme.inputs() if with_inputs else None
    if inputs is not None:
        layer.quantize_inputs = inputs
        layer.register_forward_pre_hook(_quantize_inputs, with_kwargs=True)
    gradients = scheme.gradients()
    if gradients is not None:
        layer.quantize_gradients = gradients
        layer.register_forward_hook(_quantize_gradients)


def _quantize_inputs(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if args:
        return (layer.quantize_inputs(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": layer.quantize_inputs(kwargs["input"])}


def _quantize_gradients(layer: Any, _: object, outputs: Tensor) -> Tensor:
    quantized: Tensor = layer.quantize_gradients(outputs)
    return quantized


def bounds_of(model: nn.Module) -> dict[str, float]:
    """Return the largest magnitude of parameters that are clipped after each update, by name; others are left out."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            for parametrization in module:
                if (bound := getattr(parametrization, "bound", None)) is not None:
                    found[f"{path}.original"] = float(bound)
    return found


def renamed(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model of floating-point numbers by the names that they have in its quantized form.

    Args:
        model: the quantized model.
        tensors: tensors by name; those of a quantized model keep their names.
    """
    there = model.state_dict()
    return {_name_in(there, name): tensor for name, tensor in tensors.items()}


def _name_in(there: Mapping[str, Tensor], name: str) -> str:
    path, _, leaf = name.rpartition(".")
    quantized = f"{path}.{_WEIGHT}" if path else _WEIGHT
    return quantized if leaf == "weight" and name not in there and quantized in there else name
