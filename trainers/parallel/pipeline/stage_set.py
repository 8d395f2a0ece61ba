"""The stages of one worker as one module, with the plain model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


class StageSet(nn.Module):
    """A module that holds the parameters, buffers and modules of several stages, under their names in the plain model.

    It is not called; its stages are.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "_stages", tuple(stages[index] for index in sorted(stages)))
        for stage in stages.values():
            _merge(self, stage)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield every module once, those included that have no name in the model."""
        stages: Any = self._stages
        yield from dict.fromkeys([*super().modules(), *(module for stage in stages for module in stage.modules())])

    def train(self, mode: bool = True) -> StageSet:
        """Set the mode of this module and of its stages."""
        super().train(mode)
        stages: Any = self._stages
        for stage in stages:
            stage.train(mode)
        return self


def _merge(into: nn.Module, source: nn.Module) -> None:
    for name, parameter in source._parameters.items():
        into.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        into.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        if child is None:
            continue
        there = into._modules.get(name)
        if type(child) is not nn.Module:  # a module of the model, held whole
            into.add_module(name, child)
            continue
        # An empty module on the path to the model's modules: both stages may have some below it.
        if there is None:
            there = nn.Module()
            into.add_module(name, there)
        _merge(there, child)
