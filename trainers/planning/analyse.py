"""The analysis of a model: the work, the depth and the bytes of each layer, forward and backward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import TaskError
from orchestray.trainers.analysis.brent import least_time, most_time, useful_processors
from orchestray.trainers.analysis.graph import OperatorGraph
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.analysis.unfused import FusedCalls, unfused
from orchestray.trainers.planning.layer_watch import Saved, Shapes, plain_name
from orchestray.trainers.planning.padding import PaddingCost, padding_costs
from orchestray.trainers.planning.recomputation import Recomputation, recomputations
from orchestray.trainers.planning.subject import Subject
from orchestray.trainers.planning.tensor_traffic import Traffic, traffic_of_plans

PROCESSORS = (1, 16, 256, 4096, 65_536)
"""Numbers of processors for which the bounds of a step's time are shown."""


_FUSED_NOTES = {
    "attention": "attention is counted by its operations: a kernel that fuses them keeps less for the backward pass",
    "recurrences": "recurrences are counted by their operations: a kernel of a whole layer keeps more for the "
    "backward pass",
}
"""Notes on kinds of layers that torch's kernels may compute at once."""


@dataclass(frozen=True)
class TimeBounds:
    """The bounds of a step's time on some processors that each do an operation in a unit of time."""

    processors: int
    least: float
    """Time that no schedule is below, max(W / p, D)."""
    most: float
    """Time that every greedy schedule keeps, W / p + D (Brent 1974)."""


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
    """Bytes that it keeps for the backward pass, of whole tensors of which it may keep a part; the batch and the
    parameters, which are there anyway, aside.
    """
    output_bytes: int
    """Bytes of its outputs: what a pipeline cut after it sends, forward, and again backward."""
    halo_bytes: int
    """Bytes that two workers with half of the images' rows each exchange before it, and again backward."""
    tensor_bytes: int
    """Bytes that a worker sends in a step for it, if two workers split the model by the plan `auto`."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "forward": self.forward.to_json(), "backward": self.backward.to_json()}


@dataclass(frozen=True)
class Interval:
    """A layer's forward or backward pass in a step on a machine with a processor for each operation."""

    layer: str
    """Name of the module; empty: what is in none."""
    is_backward: bool
    begin: int
    """Depth at which its first operation begins."""
    end: int
    """Depth at which its last one ends."""
    on_path: tuple[tuple[int, int], ...]
    """Parts of it on the longest chain, (begin, end)."""


@dataclass(frozen=True)
class Analysis:
    """The costs of a training step of a model, in one process."""

    name: str
    batch_size: int
    """Samples of the batch; of a module without a task, the first size of its first input."""
    inputs: tuple[str, ...]
    """Shapes of the inputs, with the types of those that are not numbers with a fraction."""
    is_of_samples: bool
    """True if `batch_size` is known to be a number of samples."""
    parameters: int
    parameter_bytes: int
    """Bytes of the trained parameters: what data parallelism adds up in each step."""
    forward: PassCost
    backward: PassCost
    saved_bytes: int
    """Bytes kept between the passes."""
    recomputations: tuple[Recomputation, ...]
    """The step with each way of `train.recompute` that finds parts of the model."""
    traffic: tuple[Traffic, ...]
    """Bytes of two workers that split the model, by each plan of `strategy.network.plan` that fits it."""
    padding: tuple[PaddingCost, ...]
    """Multiplications with matrices padded for tensor cores and TPUs."""
    layers: tuple[LayerCost, ...]
    critical_path: tuple[tuple[str, int], ...]
    """Layers on the longest chain, in their order, each with its depth there."""
    intervals: tuple[Interval, ...]
    """The passes of all layers in the order in which they begin."""
    uncounted: Mapping[str, int]
    """Calls of operations that no number here includes."""
    notes: tuple[str, ...]

    @property
    def bounds(self) -> tuple[TimeBounds, ...]:
        """Bounds of the time of a forward and a backward pass, one for each of `PROCESSORS`."""
        work, depth = self.forward.work + self.backward.work, self.forward.depth + self.backward.depth
        return tuple(TimeBounds(p, least_time(work, depth, p), most_time(work, depth, p)) for p in PROCESSORS)

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("name", "batch_size", "parameters", "parameter_bytes")},
            "inputs": list(self.inputs),
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "bounds": [asdict(each) for each in self.bounds],
            "saved_bytes": self.saved_bytes,
            "recomputations": [asdict(each) for each in self.recomputations],
            "traffic": [{**asdict(each), "num_bytes": each.num_bytes} for each in self.traffic],
            "padding": [each.to_json() for each in self.padding],
            "layers": [layer.to_json() for layer in self.layers],
            "critical_path": [{"layer": layer, "depth": depth} for layer, depth in self.critical_path],
            "intervals": [asdict(each) for each in self.intervals],
            "uncounted": dict(self.uncounted),
            "notes": list(self.notes),
        }


def analyse(subject: Subject) -> Analysis:
    """Analyse a step of a model, on its device: on `meta` nothing is computed.

    Raises:
        TaskError: the model needs values, which there are none of on `meta`; or it fails, or has an operator of
            torch that calls functions.
    """
    recorder, saved, shapes, fused = Recorder(), Saved(subject), Shapes(subject.model), FusedCalls()
    is_on_meta = all(each.is_meta for each in tensors_in(subject.inputs))
    try:
        with recorder, saved.watched(recorder), shapes.watched(), nullcontext() if is_on_meta else unfused():
            with fused:
                loss = subject.forward()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
        if called := re.search(r"rule registered for HigherOrderOperator (\w+)", str(error)):
            raise TaskError(
                f"{subject.name} calls torch's operator {called[1]}, and what the functions within it compute cannot "
                f"be counted: have the model compute that by operations of Python, with a loop or an if"
            ) from error
        if not is_on_meta:
            raise TaskError(f"{subject.name} cannot be run: {message}") from error
        raise TaskError(
            f"{subject.name} cannot be traced without values: {message}. If it is because the model looks at values, "
            "--measure helps: it is run, and counted so."
        ) from error
    graph = recorder.graph
    traffic = traffic_of_plans(subject) if is_on_meta else ()
    auto = next((each.layer_bytes for each in traffic if each.kind == "auto"), {})
    trained = [each for each in subject.model.parameters() if each.requires_grad]
    return Analysis(
        name=subject.name,
        batch_size=subject.batch_size,
        inputs=tuple(map(_shape, tensors_in(subject.inputs))),
        is_of_samples=subject.task is not None,
        parameters=sum(each.numel() for each in subject.model.parameters()),
        parameter_bytes=sum(each.numel() * each.element_size() for each in trained),
        forward=_cost(graph, is_backward=False),
        backward=_cost(graph, is_backward=True),
        saved_bytes=saved.total_bytes,
        recomputations=recomputations(subject) if is_on_meta and loss.requires_grad else (),
        traffic=traffic,
        padding=tuple(padding_costs(recorder.products)),
        layers=_layers(subject.model, graph, saved, shapes, auto),
        critical_path=_critical_path(graph),
        intervals=_intervals(graph),
        uncounted=graph.uncounted,
        notes=(
            *subject.notes,
            *_notes_on(subject.model),
            *(() if loss.requires_grad else ("no backward pass: nothing needs a gradient",)),
            *(_FUSED_NOTES[kind] for kind in sorted(fused.kinds) if loss.requires_grad),
        ),
    )


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return f"{list(tensor.shape)}{kind}"


def _notes_on(model: nn.Module) -> Iterator[str]:
    frozen = [each for each in model.parameters() if not each.requires_grad]
    if frozen:
        yield f"{sum(each.numel() for each in frozen):,} of the parameters are frozen: they have no gradients"
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        if others:
            yield f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} {first} (tied), and counted there"


def _layers(
    model: nn.Module, graph: OperatorGraph, saved: Saved, shapes: Shapes, tensor_bytes: Mapping[str, int]
) -> tuple[LayerCost, ...]:
    own: dict[str, list[int]] = {}
    for number, each in enumerate(graph.operations):
        own.setdefault(plain_name(each.layer), []).append(number)
    parameters = _parameters_of(model, own)
    found = []
    for name, module in model.named_modules():
        if name not in own and name not in parameters:
            continue
        part = graph.part(own.get(name, ()))
        found.append(
            LayerCost(
                name=name,
                kind=type(module).__name__,
                parameters=parameters[name],
                forward=_cost(part, is_backward=False),
                backward=_cost(part, is_backward=True),
                saved_bytes=saved.by_layer[name],
                output_bytes=shapes.output_bytes[name],
                halo_bytes=shapes.halo_bytes[name],
                tensor_bytes=tensor_bytes.get(name, 0),
            )
        )
    return tuple(found)


def _parameters_of(model: nn.Module, with_operations: Collection[str]) -> Counter[str]:
    """Return the parameters of each layer, each once.

    A module whose parameters another one uses, such as the output of an attention, has no operations of its own: they
    are those of the innermost module around it that has some.
    """
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        around = name.rpartition(".")[0]
        while around and around not in with_operations:
            around = around.rpartition(".")[0]
        found[around or name.rpartition(".")[0]] += parameter.numel()
    return found


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
        name = f"{plain_name(operation.layer) or operation.name}{', backward' if operation.is_backward else ''}"
        if path and path[-1][0] == name:
            path[-1] = name, path[-1][1] + operation.cost.depth
        elif operation.cost.depth:
            path.append((name, operation.cost.depth))
    return tuple(path)


def _intervals(graph: OperatorGraph) -> tuple[Interval, ...]:
    on_path = set(graph.critical_path())
    within: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    chosen: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for number, (operation, end) in enumerate(zip(graph.operations, graph.ends, strict=True)):
        if not operation.cost.depth:
            continue
        key, part = (plain_name(operation.layer), operation.is_backward), (end - operation.cost.depth, end)
        within.setdefault(key, []).append(part)
        if number in on_path:
            parts = chosen.setdefault(key, [])
            if parts and parts[-1][1] == part[0]:
                part = parts.pop()[0], part[1]
            parts.append(part)
    found = [
        Interval(*key, min(begin for begin, _ in parts), max(end for _, end in parts), tuple(chosen.get(key, ())))
        for key, parts in within.items()
    ]
    return tuple(sorted(found, key=lambda interval: interval.begin))
