"""The analysis of a model: the work, the depth and the bytes of each layer, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import TaskError
from orchestray.trainers.analysis.brent import useful_processors
from orchestray.trainers.analysis.graph import OperatorGraph
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.planning.subject import Subject

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PassCost:
    """The costs of a forward or a backward pass."""

    work: int
    """Scalar operations, W: a multiplication and an addition are two."""
    multiplications: int
    depth: int
    """Operations on the longest chain, D."""
    num_bytes: int
    """Bytes that its operations read and write, each tensor once an operation."""

    @property
    def parallelism(self) -> float:
        """Average parallelism W / D."""
        return self.work / max(1, self.depth)

    @property
    def useful_processors(self) -> int:
        """Most processors that Brent's bound W / p + D keeps busy for half of the time."""
        return useful_processors(self.work, self.depth)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, operations a byte."""
        return self.work / max(1, self.num_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "parallelism": self.parallelism,
            "useful_processors": self.useful_processors,
            "intensity": self.intensity,
        }


@dataclass(frozen=True)
class LayerCost:
    """The costs of a layer of a model, for a batch."""

    name: str
    """Name of the module; empty: what is in none, such as the loss."""
    kind: str
    parameters: int
    forward: PassCost
    backward: PassCost
    saved_bytes: int
    """Bytes that it keeps for the backward pass, parameters aside."""
    output_bytes: int
    """Bytes of its outputs: what a pipeline cut after it sends, forward, and again backward."""
    halo_bytes: int
    """Bytes that a split of images into two parts exchanges before it, each way."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "forward": self.forward.to_json(), "backward": self.backward.to_json()}


@dataclass(frozen=True)
class Analysis:
    """The costs of a training step of a model, in one process."""

    name: str
    batch_size: int
    parameters: int
    parameter_bytes: int
    """Bytes of the trained parameters: what data parallelism adds up in each step."""
    forward: PassCost
    backward: PassCost
    saved_bytes: int
    """Bytes kept between the passes, which recomputation would spare in part."""
    layers: tuple[LayerCost, ...]
    critical_path: tuple[tuple[str, int], ...]
    """Layers on the longest chain, in their order, each with its depth there."""
    uncounted: Mapping[str, int]
    """Calls of operations that no number here includes."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("name", "batch_size", "parameters", "parameter_bytes")},
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "saved_bytes": self.saved_bytes,
            "layers": [layer.to_json() for layer in self.layers],
            "critical_path": [{"layer": layer, "depth": depth} for layer, depth in self.critical_path],
            "uncounted": dict(self.uncounted),
            "notes": list(self.notes),
        }


def analyse(subject: Subject) -> Analysis:
    """Analyse a step of a model on `meta`: nothing is computed.

    Raises:
        TaskError: the model needs values, which there are none of on `meta`.
    """
    recorder, saved, shapes = Recorder(), _Saved(subject.model), _Shapes(subject.model)
    try:
        with recorder, saved.watched(recorder), shapes.watched():
            loss = subject.forward()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TaskError(
            f"{subject.name} cannot be traced without values: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    graph = recorder.graph
    layers = _layers(subject.model, graph, saved, shapes)
    trained = [each for each in subject.model.parameters() if each.requires_grad]
    return Analysis(
        name=subject.name,
        batch_size=subject.batch_size,
        parameters=sum(each.numel() for each in subject.model.parameters()),
        parameter_bytes=sum(each.numel() * each.element_size() for each in trained),
        forward=_cost(graph, is_backward=False),
        backward=_cost(graph, is_backward=True),
        saved_bytes=saved.total_bytes,
        layers=layers,
        critical_path=_critical_path(graph),
        uncounted=graph.uncounted,
        notes=(*subject.notes, *(() if loss.requires_grad else ("no backward pass: nothing needs a gradient",))),
    )


def _layers(model: nn.Module, graph: OperatorGraph, saved: _Saved, shapes: _Shapes) -> tuple[LayerCost, ...]:
    modules = dict(model.named_modules())
    names = dict.fromkeys([*map(_plain_name, (each.layer for each in graph.operations))])
    found = []
    for name in (each for each in modules if each in names):
        own = [number for number, each in enumerate(graph.operations) if _plain_name(each.layer) == name]
        module, part = modules[name], graph.part(own)
        found.append(
            LayerCost(
                name=name,
                kind=type(module).__name__,
                parameters=sum(each.numel() for each in module.parameters(recurse=False)),
                forward=_cost(part, is_backward=False),
                backward=_cost(part, is_backward=True),
                saved_bytes=saved.by_layer[name],
                output_bytes=shapes.output_bytes[name],
                halo_bytes=shapes.halo_bytes[name],
            )
        )
    return tuple(found)


def _cost(graph: OperatorGraph, *, is_backward: bool) -> PassCost:
    part = graph.part(number for number, each in enumerate(graph.operations) if each.is_backward == is_backward)
    return PassCost(
        part.work,
        sum(each.cost.multiplications for each in part.operations),
        part.depth,
        sum(each.num_bytes for each in part.operations),
    )


def _critical_path(graph: OperatorGraph) -> tuple[tuple[str, int], ...]:
    path: list[tuple[str, int]] = []
    for number in graph.critical_path():
        operation = graph.operations[number]
        name = f"{_plain_name(operation.layer) or operation.name}{', backward' if operation.is_backward else ''}"
        if path and path[-1][0] == name:
            path[-1] = name, path[-1][1] + operation.cost.depth
        elif operation.cost.depth:
            path.append((name, operation.cost.depth))
    return tuple(path)


def _plain_name(layer: str) -> str:
    """Return a module's name within the model: the tracker begins with the model's class."""
    return layer.partition(".")[2]


class _Saved:
    """The tensors that a forward pass keeps for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.by_layer: Counter[str] = Counter()
        self._parameters = {_key(each) for each in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, Any] = {}

    @property
    def total_bytes(self) -> int:
        return sum(self.by_layer.values())

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[None]:
        def keep(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._parameters and key not in self._seen:
                self._seen[key] = tensor.untyped_storage()  # held: the address of one that is gone would be another's
                self.by_layer[_plain_name(recorder.layer)] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield


class _Shapes:
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
                if isinstance(module, _CONVOLUTIONS) and isinstance(inputs[0], Tensor):
                    self.halo_bytes[name] += _halo_bytes(inputs[0], int(module.kernel_size[0]))

            hooks.append(module.register_forward_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _halo_bytes(x: Tensor, kernel: int) -> int:
    """Return the bytes of the rows that one half of the images needs of the other."""
    a_row = x.numel() // x.shape[2] * x.element_size()
    return a_row * (kernel // 2)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
