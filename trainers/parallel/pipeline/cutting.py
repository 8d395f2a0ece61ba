"""The way from a task's model to its layers: listed by the task, taken from an nn.Sequential, or traced."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from orchestray.platform.data.source import first_row
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.inputs import ONE_TENSOR, InputForm, arguments, inputs_of
from orchestray.trainers.core.rng import draws
from orchestray.trainers.parallel.pipeline.layers import Layers
from orchestray.trainers.parallel.pipeline.tracing import UntraceableError, record, tensor_names
from orchestray.trainers.parallel.pipeline.values import kind_of

_SEVERAL_RESULTS = {
    *("chunk", "split", "tensor_split", "unbind", "topk", "sort", "max", "min", "meshgrid", "broadcast_tensors"),
    *("hsplit", "vsplit", "dsplit", "split_with_sizes", "aminmax", "median", "mode", "kthvalue", "cummax", "cummin"),
    *("unique", "svd", "qr", "eigh", "multi_head_attention_forward", "without_gradients", "var_mean", "std_mean"),
}
"""Operations that may return a tuple: its parts travel between stages, not the tuple."""


def layers_of(
    task: Any, model: nn.Module, at_least: int = 2, begins: Sequence[str] = (), *, inputs: Any = None
) -> Layers:
    """Return the layers between which a pipeline may cut the model.

    If the task has a method `layers(model) -> Sequence[nn.Module]`, these modules are called one after another.
    Otherwise the layers are the children of an nn.Sequential, nested ones included. Otherwise the model's forward pass
    is traced: each module it calls begins a layer, and operations between modules belong to the layer before them.
    Modules are opened up where that is needed.

    Args:
        task: the user's task.
        model: the result of `build_model`, in its precision, on its device, without hooks that must not be recorded.
        at_least: layers wanted. Traceable modules are opened, level by level, until there are as many or none is left.
        begins: names of modules that are to begin a layer.
        inputs: inputs of the model, whose tensors may be of any size, but have as many dimensions as these; default:
            one tensor with any number of them, or as the task makes them if the model takes more.

    Raises:
        ConfigError: the model cannot be traced, or the task lists modules that are not the model's.
    """
    inputs = _inputs(task, model) if inputs is None else inputs
    form = ONE_TENSOR if inputs is None else InputForm(inputs, are_known=True)
    listed = getattr(task, "layers", None)
    if listed is not None:
        return _listed(model, listed(model), form)
    if is_plain_sequence(model):
        layers = _listed(model, list(model.children()), form)
        if len(layers) >= at_least and all(any(_is_in(name, begin) for name in layers.names) for begin in begins):
            return layers
    return _traced(model, at_least, begins, form)


def _inputs(task: Any, model: nn.Module) -> Any:
    """Return inputs as the task makes them, or None if the model takes one value only."""
    takes = inspect.signature(model.forward).parameters
    if len(takes) <= 1 or task is None:
        return None
    try:
        return inputs_of(task.to_batch(first_row(task)))
    except Exception as error:
        raise ConfigError(
            f"The model ({type(model).__name__}) takes {', '.join(takes)}; which of them it is called with was to be "
            f"seen in the first row of the data, and that failed: {type(error).__name__}: {error}"
        ) from error


def is_plain_sequence(module: nn.Module) -> bool:
    """Return True if calling the module just calls its children one after the other, without hooks."""
    return (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _is_hooked(module)
    )


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _listed(model: nn.Module, modules: Sequence[nn.Module], form: InputForm) -> Layers:
    """Return a chain of modules as layers, of which the first is called with the inputs."""
    paths = {id(module): name for name, module in model.named_modules()}
    tensors = tensor_names(model)
    graph = fx.Graph()
    placeholders = [graph.placeholder(name) for name in form.names]
    for node in placeholders:
        node.meta["layer"] = 0
    args, kwargs = arguments(form.filled(placeholders))
    names: list[str] = []
    unnamed: list[nn.Module] = []
    for position, module in enumerate(_flat(modules)):
        name = paths.get(id(module))
        meta: dict[str, Any] = {"layer": position, "where": "layers(model)"}
        if name is None:
            name = f"layer_{position}" if f"layer_{position}" not in model._modules else f"_layer_{position}"
            meta |= _of_its_own(module, position, tensors, unnamed)
        names.append(name)
        value = graph.create_node("call_module", name, args, kwargs)
        value.meta.update(meta)
        args, kwargs = (value,), {}
    if not names:
        raise ConfigError("The model has no layers: the task's layers(model) gave none, or its nn.Sequential is empty.")
    graph.output(*args)
    return Layers(model, graph, _numbered(names), unnamed, form=form)


def _flat(modules: Sequence[nn.Module]) -> list[nn.Module]:
    flat: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"The task's layers(model) gave a {type(module).__name__} where modules are wanted: wrap functions in "
                "an nn.Module."
            )
        children = list(module.children())
        flat += _flat(children) if is_plain_sequence(module) and children else [module]
    return flat


def _of_its_own(module: nn.Module, position: int, tensors: dict[int, str], unnamed: list[nn.Module]) -> dict[str, Any]:
    """Return the node metadata by which a stage finds a module that the task has made for its list."""
    held = [*module.parameters(), *module.buffers()]
    if not held:
        return {"fresh": module}
    if any(id(tensor) not in tensors for tensor in held):
        raise ConfigError(
            f"The task's layers(model) gave a module ({type(module).__name__}, number {position + 1}) with parameters "
            "or buffers that are not the model's: they would not be trained or saved. Make it a part of the model in "
            "build_model."
        )
    unnamed.append(module)
    return {"unnamed": len(unnamed) - 1}


def _numbered(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}@{seen[name]}")
    return numbered


def _traced(model: nn.Module, at_least: int, begins: Sequence[str], form: InputForm) -> Layers:
    modules = dict(model.named_modules())
    whole: dict[str, str] = {}
    wanted = {".".join(atoms[:end]) for atoms in (name.split(".") for name in begins) for end in range(1, len(atoms))}
    opened = {name for name in wanted if name in modules and _may_open(modules[name])}
    while True:
        opened |= {name for name, module in modules.items() if is_plain_sequence(module) and len(module._modules)}
        opened -= whole.keys()
        try:
            recorded = record(model, opened, form)
        except UntraceableError as error:
            if not error.scope:
                raise ConfigError(_untraceable(model, error)) from error
            whole[error.scope] = str(error)
            continue
        names = _assign(recorded.graph)
        if len(names) >= at_least:
            break
        called = {str(node.target) for node in recorded.graph.nodes if node.op == "call_module"}
        more = {name for name in called - whole.keys() - opened if _may_open(modules[name])}
        if not more:
            break
        opened |= more
    return Layers(model, recorded.graph, names, constants=recorded.constants, whole=whole, form=form)


def _may_open(module: nn.Module) -> bool:
    """Return True if the module may be opened: not if that would lose what calling it does besides `forward`."""
    if not module._modules or _is_hooked(module) or draws(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    if type(module).forward.__module__.startswith("torch.nn."):
        return any(isinstance(child, nn.ModuleList) for child in module.children())
    return True


def _assign(graph: fx.Graph) -> list[str]:
    """Set each node's layer in its `meta`, and return the layers' names."""
    names: list[str] = []
    for node in graph.nodes:
        if node.op == "call_module" or any(arg.meta.get("is_module") for arg in node.all_input_nodes):
            module = node if node.op == "call_module" else node.all_input_nodes[0]
            names.append(str(module.target))
        node.meta["layer"] = max(len(names) - 1, 0)
        if _belongs_to_source(node):
            node.meta["layer"] = node.args[0].meta["layer"]
    return _numbered(names) or ["model"]


def _belongs_to_source(node: fx.Node) -> bool:
    """Return True if a node takes a part out of another's result, so that the part can travel alone."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source: fx.Node = node.args[0]
    if node.target is getattr:
        return kind_of(node) != "tensor" or source.op == "call_module"
    if getattr(node.target, "__name__", "") != "getitem" or not isinstance(node.args[1], int | str):
        return False
    name = source.target if isinstance(source.target, str) else getattr(source.target, "__name__", "")
    is_several = source.op == "call_module" or name in _SEVERAL_RESULTS
    return is_several or kind_of(source) == "size" or _belongs_to_source(source)


def _untraceable(model: nn.Module, error: UntraceableError) -> str:
    return (
        f"The model ({type(model).__name__}) cannot be cut into pipeline stages by tracing it: {error.where}: "
        f"{error.reason}. Give the task a method layers(model) that returns the modules to call one after the other, "
        "or write the model as an nn.Sequential, or move that code to a module of its own, which is then called whole."
    )
