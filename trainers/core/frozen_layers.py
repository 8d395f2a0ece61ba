"""Layers that are not trained, by patterns of the names of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from orchestray.platform.errors import ConfigError

_SHOWN = 8


def freeze_layers(model: nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters whose names fit a pattern keep their values, in place.

    A module all of whose parameters are frozen is put into evaluation mode, in which it stays: its running statistics
    keep their values too, and it drops nothing.

    Args:
        model: the model.
        patterns: patterns such as `features.*`.

    Raises:
        ConfigError: a pattern fits no parameter, or none is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not found:
            shown = ", ".join([*list(named)[:_SHOWN], *(["..."] if len(named) > _SHOWN else [])])
            raise ConfigError(
                f"config: train.freeze: no parameter has a name like {pattern!r}; there are {shown or 'none'}"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(
            f"config: train.freeze: {' and '.join(map(repr, patterns))} freeze every parameter of the model, so there "
            "is nothing to train; leave some out"
        )
    for module in model.modules():
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()
