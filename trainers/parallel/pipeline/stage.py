"""One stage of a cut model: it runs its part of the graph on the model's own tensors, under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx, nn

from orchestray.trainers.parallel.pipeline.values import kind_of, packed, unpacked

_Environment = dict[fx.Node, Any]
_Getter = Callable[[_Environment], Any]


@dataclass(frozen=True)
class Parts:
    """The contents of a stage, by the model's names."""

    modules: Mapping[str, nn.Module]
    tensors: Mapping[str, tuple[Tensor, bool]]
    """Parameters and buffers that no module of the stage holds, each with True if `state_dict` has it."""
    unnamed: tuple[nn.Module, ...] = ()
    """Modules that are called but are not the model's; they hold tensors of the model."""


class Stage(nn.Module):
    """Some layers of a model, called one after the other: `forward(*values) -> tuple`.

    `values` are what the stage before returned; the first stage's are the tensors in the model's inputs. A
    stage returns the tensors that the next stage takes; the last one returns `(outputs,)`, the model's outputs.
    Parameters, buffers and modules are the model's own objects, under its names. Values that need gradients may be
    leaves.
    """

    def __init__(self, parts: Parts, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Gives) -> None:
        super().__init__()
        for name, module in parts.modules.items():
            _place(self, name, module)
        for name, (tensor, is_persistent) in parts.tensors.items():
            _place(self, name, tensor, is_persistent)
        object.__setattr__(self, "_unnamed", parts.unnamed)  # not in the state_dict: their tensors are in it already
        self._program = _Program(list(takes), [kind_of(node) for node in takes], gives, _steps(nodes, gives))

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield every module once, those included that have no name in the model."""
        unnamed: Sequence[nn.Module] = cast(Any, self)._unnamed
        yield from dict.fromkeys([*super().modules(), *(part for module in unnamed for part in module.modules())])

    def train(self, mode: bool = True) -> Stage:
        for module in cast(Any, self)._unnamed:
            module.train(mode)
        return super().train(mode)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        program = self._program
        env = program.received(values)
        for step in program.steps:
            try:
                env[step.node] = step.run(self, env)
            except Exception as error:
                if not step.is_module:
                    error.add_note(f"in the model's forward: {step.node.meta.get('where')}")
                raise
            for node in step.last_uses:
                del env[node]
        return program.gives.values(env)


class Gives:
    """The values that a stage returns."""

    def __init__(self, nodes: Sequence[fx.Node], outputs: Any = None, layer: str = "", *, is_last: bool) -> None:
        self.nodes = list(nodes)
        """Values that are needed later, or are in the model's outputs."""
        self._kinds = [kind_of(node) for node in nodes]
        self._outputs = _getter(outputs) if is_last else None
        self._layer = layer

    def values(self, env: _Environment) -> tuple[Any, ...]:
        if self._outputs is not None:
            return (self._outputs(env),)
        return packed([env[node] for node in self.nodes], self._kinds, self._layer)


@dataclass(frozen=True)
class _Step:
    node: fx.Node
    function: Callable[[nn.Module, _Environment], Any]
    args: tuple[_Getter, ...]
    kwargs: tuple[tuple[str, _Getter], ...]
    is_module: bool
    last_uses: tuple[fx.Node, ...]

    def run(self, stage: nn.Module, env: _Environment) -> Any:
        called = self.function(stage, env)
        if self.node.op == "get_attr":
            return called
        return called(*[get(env) for get in self.args], **{name: get(env) for name, get in self.kwargs})


@dataclass(frozen=True)
class _Program:
    """The operations of a stage. It holds no module or tensor, so copies of the stage share it."""

    takes: list[fx.Node]
    kinds: list[str]
    gives: Gives
    steps: list[_Step]

    def received(self, values: Sequence[Any]) -> _Environment:
        """Return what the stage before has given, by its nodes."""
        return dict(zip(self.takes, unpacked(values, self.kinds), strict=True))

    def __deepcopy__(self, memo: object) -> _Program:
        return self


def _steps(nodes: Sequence[fx.Node], gives: Gives) -> list[_Step]:
    kept = set(gives.nodes)
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last_use[node] = node  # of a value that nothing uses
        for used in node.all_input_nodes:
            last_use[used] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for used, by in last_use.items():
        if used not in kept:
            ends.setdefault(by, []).append(used)
    return [_step(node, tuple(ends.get(node, ()))) for node in nodes]


def _step(node: fx.Node, last_uses: tuple[fx.Node, ...]) -> _Step:
    args = list(node.args)
    function: Callable[[nn.Module, _Environment], Any]
    target: Any = node.target
    if node.op == "call_function":
        function = lambda _stage, _env: target  # noqa: E731
    elif node.op == "call_method":
        receiver = _getter(args.pop(0))
        function = lambda _stage, env: getattr(receiver(env), target)  # noqa: E731
    elif "unnamed" in node.meta:
        index = node.meta["unnamed"]
        function = lambda stage, _env: cast(Any, stage)._unnamed[index]  # noqa: E731
    else:
        path, leaf = _split(target)
        function = lambda stage, _env: getattr(_walk(stage, path), leaf)  # noqa: E731
    getters = tuple(_getter(arg) for arg in args)
    kwargs = tuple((name, _getter(arg)) for name, arg in node.kwargs.items())
    return _Step(node, function, getters, kwargs, node.op == "call_module", last_uses)


def _getter(arg: Any) -> _Getter:
    """Return a function that finds an argument's value; it builds containers again on each call."""
    if isinstance(arg, fx.Node):
        return lambda env: env[arg]
    if isinstance(arg, slice):
        ends = [_getter(end) for end in (arg.start, arg.stop, arg.step)]
        return lambda env: slice(*[get(env) for get in ends])
    if isinstance(arg, tuple) and "_fields" in vars(type(arg)):
        parts, kind = [_getter(part) for part in arg], cast(Any, type(arg))
        return lambda env: kind(*[get(env) for get in parts])
    if isinstance(arg, tuple | list):
        parts, plain = [_getter(part) for part in arg], tuple if isinstance(arg, tuple) else list
        return lambda env: plain([get(env) for get in parts])
    if isinstance(arg, Mapping):
        items = [(key, _getter(value)) for key, value in arg.items()]
        return lambda env: {key: get(env) for key, get in items}
    return lambda _env: arg


def _split(name: str) -> tuple[list[str], str]:
    *path, leaf = name.split(".")
    return path, leaf


def _walk(module: nn.Module, path: Iterable[str]) -> nn.Module:
    for atom in path:
        module = cast(nn.Module, module._modules[atom])
    return module


def _place(stage: nn.Module, name: str, value: nn.Module | Tensor, is_persistent: bool = True) -> None:
    """Put a module or tensor at its path, through the model's own modules or empty ones."""
    path, leaf = _split(name)
    owner = stage
    for atom in path:
        if atom not in owner._modules:
            owner.add_module(atom, nn.Module())
        owner = cast(nn.Module, owner._modules[atom])
    if isinstance(value, nn.Module):
        if owner._modules.get(leaf) is not value:
            owner.add_module(leaf, value)
    elif isinstance(value, nn.Parameter):
        if owner._parameters.get(leaf) is not value:
            owner.register_parameter(leaf, value)
    elif owner._buffers.get(leaf) is not value:
        owner.register_buffer(leaf, value, is_persistent)
