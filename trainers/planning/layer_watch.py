"""The bytes of a layer in a traced step: those that it keeps, passes on, and needs of the other half of an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import ConfigError
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.parallel.tensor.halo import tiling_of
from orchestray.trainers.parallel.tensor.tiles import window_of
from orchestray.trainers.planning.subject import Subject

_OF_SEQUENCES = (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d)


def plain_name(layer: str) -> str:
    """Return a module's name within the model: the tracker begins with the model's class."""
    return layer.partition(".")[2]


class Saved:
    """The tensors that a forward pass keeps for the backward pass; without the batch and the parameters."""

    def __init__(self, subject: Subject) -> None:
        self.by_layer: Counter[str] = Counter()
        model = subject.model
        held = (*model.parameters(), *model.buffers(), *tensors_in(subject.inputs))
        self._held = {_key(each) for each in held}
        self._seen: dict[int, Any] = {}

    @property
    def total_bytes(self) -> int:
        return sum(self.by_layer.values())

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[None]:
        def keep(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._held and key not in self._seen:
                self._seen[key] = tensor.untyped_storage()  # held: the address of one that is gone would be another's
                self.by_layer[plain_name(recorder.layer)] += self._seen[key].nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield


class Shapes:
    """The sizes of what layers pass on, and of what a split of images exchanges."""

    def __init__(self, model: nn.Module) -> None:
        self.output_bytes: Counter[str] = Counter()
        self.halo_bytes: Counter[str] = Counter()
        self._model = model

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = []
        for name, module in self._model.named_modules():

            def note(module: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
                self.output_bytes[name] += sum(each.numel() * each.element_size() for each in tensors_in(outputs))
                if inputs and isinstance(inputs[0], Tensor):
                    self.halo_bytes[name] += _halo_bytes(module, inputs[0])

            hooks.append(module.register_forward_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _halo_bytes(module: nn.Module, x: Tensor) -> int:
    """Return the bytes of the rows that the two halves of some images need of each other; 0 without a window."""
    dim = -1 if isinstance(module, _OF_SEQUENCES) else -2
    window = window_of(module, dim) if x.dim() > -dim else None
    if window is None:
        return 0
    size = x.shape[dim]
    try:
        tiling = tiling_of(window, size, 2, type(module).__name__)
    except ConfigError:  # too few rows
        return 0
    rows = sum(last - first for first, last in (tiling.halo(0, 1), tiling.halo(1, 0)))
    return rows * (x.numel() // size) * x.element_size()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
