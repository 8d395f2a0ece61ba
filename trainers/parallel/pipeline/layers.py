"""The layers between which a pipeline may cut a model, one after the other, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.inputs import ONE_TENSOR, InputForm
from orchestray.trainers.parallel.pipeline.balance import check_count
from orchestray.trainers.parallel.pipeline.cuts import forbidden_cuts
from orchestray.trainers.parallel.pipeline.stage import Gives, Parts, Stage
from orchestray.trainers.parallel.pipeline.tracing import tensor_names


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages use; their gradients of it must be summed."""

    name: str
    """Name in the model; the first one if there are several."""
    uses: tuple[tuple[int, str], ...]
    """Stages that have the parameter, each with its name there."""


class Layers:
    """A model in layers, as a graph of calls. `layers_of` makes it; the model is not changed.

    Make stages once the model has its precision and its device. Modules may change their class and their `forward`
    later: a stage calls them as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        names: Sequence[str],
        unnamed: Sequence[nn.Module] = (),
        constants: Mapping[str, Tensor] | None = None,
        whole: Mapping[str, str] | None = None,
        form: InputForm = ONE_TENSOR,
    ) -> None:
        """Args:
        model: the plain model.
        graph: its forward pass; each node's `meta["layer"]` is the index of its layer.
        names: names of the layers, in order.
        unnamed: modules that the graph calls and that are not the model's, indexed by `meta["unnamed"]`.
        constants: tensors that the graph looks up and that are not in the model's modules.
        whole: modules that could not be opened, each with the reason.
        form: form of the model's inputs, of which each tensor is a placeholder.
        """
        self.model = model
        self.form = form
        self.names = list(names)
        """Name of each layer: that of the module it begins with. A module's second call has "@2" after its name."""
        self.whole = dict(whole or {})
        """Modules that stay one layer because they cannot be traced, each with the reason."""
        self._graph = graph
        self._unnamed = list(unnamed)
        self._constants = dict(constants or {})
        self._nodes: list[list[fx.Node]] = [[] for _ in self.names]
        for node in graph.nodes:
            if node.op not in {"placeholder", "output"} and not _is_fetched(node):
                self._nodes[node.meta["layer"]].append(node)
        own = dict(model.named_modules(remove_duplicate=False))
        ordered = [node for node in graph.nodes if node.op != "output"]
        self.forbidden_cuts = forbidden_cuts(ordered, lambda node: self._called(node, own))
        """Layers that must be in one stage with the layer before, each with the reason: a sentence. Two calls of a
        module with buffers would change two copies; a change in place would not reach the other stage's memory.
        """
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in graph.nodes if node.op == "output")

    def __len__(self) -> int:
        return len(self.names)

    def stage(self, start: int, stop: int) -> Stage:
        """Return the layers from `start` up to `stop` as a module; see `Stage`.

        The stage that begins at layer 0 holds the parameters that no layer uses.

        Raises:
            ConfigError: there must be no cut there; see `forbidden_cuts`.
        """
        if not 0 <= start < stop <= len(self):
            raise ValueError(f"there are layers 0 to {len(self) - 1}, got {start} up to {stop}")
        self.check([(start, stop)])
        return self.part(start, stop)

    def part(self, start: int, stop: int) -> Stage:
        """Return the same as `stage`, but ignore forbidden cuts: for measuring layers, not for training."""
        nodes = [node for layer in self._nodes[start:stop] for node in layer]
        is_last = stop == len(self)
        outputs = _outputs_of(self._output) if is_last else None
        needed = list(self._output.all_input_nodes) if is_last else self.crossing(stop)
        gives = Gives(needed, outputs, self.names[stop - 1], is_last=is_last)
        takes = self.crossing(start) if start else self._inputs
        stage = Stage(self._parts(start, stop), _with_fetches(nodes, needed), takes, gives)
        stage.training = self.model.training  # its own mode alone: those of the modules are the user's
        return stage

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return the values that pass from the layers before `cut` to those from it
        on, in the order they are computed.
        """
        kept: list[fx.Node] = []
        for node in self._graph.nodes:
            if node.op == "output" or _is_fetched(node) or _layer(node) >= cut:
                continue
            if any(_last_layer(user, len(self)) >= cut for user in node.users):
                kept.append(node)
        return kept

    def check_count(self, num_stages: int) -> None:
        """Raise a ConfigError if there are too few layers for the stages; it lists
        the modules that could not be opened.
        """
        try:
            check_count(len(self) - len(self.forbidden_cuts), num_stages)
        except ConfigError as error:
            reasons = [f"{name}: {reason}" for name, reason in self.whole.items()]
            reasons += list(dict.fromkeys(self.forbidden_cuts.values()))
            raise ConfigError(
                " ".join([*error.problems, *(["Why there are no more:"] if reasons else []), *reasons])
            ) from None

    def check(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Raise a ConfigError if a cut separates layers that must stay in one stage."""
        for cut in sorted({end for bound in bounds for end in bound}):
            if cut in self.forbidden_cuts:
                raise ConfigError(self.forbidden_cuts[cut])

    def tied(self, bounds: Sequence[tuple[int, int]]) -> list[Tied]:
        """Return the parameters that several stages share, in the model's order.

        Raises:
            ConfigError: there must be no cut there; see `forbidden_cuts`.
        """
        self.check(bounds)
        uses: dict[int, list[tuple[int, str]]] = {}
        for index, (start, stop) in enumerate(bounds):
            for name, parameter in self._held(start, stop):
                found = uses.setdefault(id(parameter), [])
                if index not in dict(found):
                    found.append((index, name))
        return [
            Tied(name, tuple(uses[id(parameter)]))
            for name, parameter in self.model.named_parameters()
            if len(uses.get(id(parameter), [])) > 1
        ]

    def _held(self, start: int, stop: int) -> Iterator[tuple[str, nn.Parameter]]:
        parts = self._parts(start, stop)
        for name, module in parts.modules.items():
            yield from module.named_parameters(name, remove_duplicate=False)
        for name, (tensor, _) in parts.tensors.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def _parts(self, start: int, stop: int) -> Parts:
        """Return what the stage must hold, in the model's order."""
        own = dict(self.model.named_modules(remove_duplicate=False))
        called: dict[str, nn.Module] = {}
        fetched: set[str] = set()
        unnamed: set[int] = set()
        needed = list(self._output.all_input_nodes) if stop == len(self) else []
        for node in _with_fetches([node for layer in self._nodes[start:stop] for node in layer], needed):
            if "unnamed" in node.meta:
                unnamed.add(node.meta["unnamed"])
            elif node.op == "call_module" or node.meta.get("is_module"):
                name = str(node.target)
                called[name] = own[name] if name in own else node.meta["fresh"]
            elif node.op == "get_attr" and not node.meta.get("is_flag"):
                fetched.add(str(node.target))
        modules = {
            name: called[name] for name in [*(n for n in own if n in called), *(n for n in called if n not in own)]
        }
        tensors = self._tensors(modules, fetched | self._inside(unnamed) | (self._unused() if start == 0 else set()))
        return Parts(modules, tensors, tuple(self._unnamed))

    def _tensors(self, modules: Mapping[str, nn.Module], names: set[str]) -> dict[str, tuple[Tensor, bool]]:
        persistent = self.model.state_dict(keep_vars=True)
        everything = dict(_tensors_of(self.model, "")) | self._constants
        inside = {name for path, module in modules.items() for name, _ in _tensors_of(module, path)}
        return {n: (t, n in persistent) for n, t in everything.items() if n in names and n not in inside}

    def _inside(self, unnamed: set[int]) -> set[str]:
        names = tensor_names(self.model)
        return {names[id(tensor)] for index in unnamed for _, tensor in _tensors_of(self._unnamed[index], "")}

    def _unused(self) -> set[str]:
        """Return the names of the model's tensors that no layer uses."""
        own = dict(self.model.named_modules(remove_duplicate=False))
        used = self._inside(set(range(len(self._unnamed))))
        for node in self._graph.nodes:
            if node.op == "call_module" or node.meta.get("is_module"):
                if str(node.target) in own:
                    used |= {name for name, _ in _tensors_of(own[str(node.target)], str(node.target))}
            elif node.op == "get_attr":
                used.add(str(node.target))
        return {name for name, _ in _tensors_of(self.model, "")} - used

    def _called(self, node: fx.Node, own: Mapping[str, nn.Module]) -> nn.Module | None:
        """Return the module that a node calls, if it may have buffers."""
        if "unnamed" in node.meta:
            unnamed: nn.Module = self._unnamed[node.meta["unnamed"]]
            return unnamed
        if node.op == "call_module":
            return own.get(str(node.target))
        whole = [arg for arg in node.all_input_nodes if arg.meta.get("is_module")]
        return own.get(str(whole[0].target)) if whole else None


def _tensors_of(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(path, remove_duplicate=False)
    yield from module.named_buffers(path, remove_duplicate=False)


def _is_fetched(node: fx.Node) -> bool:
    """Return True if each stage looks up the node's value where it uses it, so that the value does not travel."""
    return node.op == "get_attr" or node.meta.get("is_fetched", False)


def _layer(node: fx.Node) -> int:
    return 0 if node.op == "placeholder" else int(node.meta["layer"])


def _last_layer(user: fx.Node, num_layers: int) -> int:
    """Return the index of the last layer in which `user` uses a value."""
    if user.op == "output":
        return num_layers - 1
    if _is_fetched(user):
        return max((_last_layer(node, num_layers) for node in user.users), default=-1)
    return int(user.meta["layer"])


def _with_fetches(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes, each preceded by the lookups it needs that have not been made."""
    ordered: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for used in node.all_input_nodes:
            if _is_fetched(used) and used not in ordered:
                add(used)
        ordered[node] = None

    for node in nodes:
        add(node)
    for node in outputs:
        if _is_fetched(node) and node not in ordered:
            add(node)
    return list(ordered)


def _outputs_of(output: fx.Node) -> Any:
    return output.args[0]
