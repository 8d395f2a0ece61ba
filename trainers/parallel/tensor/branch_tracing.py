"""A search for the branches of a block: its `forward` is traced with the proxies of `torch.fx`.

Imported only if a plan has blocks with branches.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.region import inner_name

_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)
_ADD = (operator.add, operator.iadd, torch.add)


@dataclass
class Block:
    """A block as branches of its input, a merge and what follows. Its modules are called, not copied."""

    branches: list[nn.Module]
    modules: list[set[str]]
    """Names in the block of the modules that each branch calls."""
    merge: Literal["concat", "sum"]
    dim: int
    """Dimension along which outputs are concatenated."""
    tail: nn.Module
    graphs: list[fx.Graph]

    def on(self, module: nn.Module) -> list[nn.Module]:
        """Return the branches, calling the modules of a copy of the block."""
        return [fx.GraphModule(module, graph) for graph in self.graphs]


class _Shadow(nn.Module):
    """A stand-in for a module of the block while its forward is traced; it records that it is called.

    `fx.Tracer` would change `nn.Module` for every thread during the tracing; a shadow of the block does not.
    """

    called_by: tuple[GraphAppendingTracer, str]

    def __call__(self, *args: Any, **options: Any) -> Any:
        tracer, name = self.called_by
        return tracer.create_proxy("call_module", name, args, options)


def _shadow(module: nn.Module, tracer: GraphAppendingTracer, name: str) -> nn.Module:
    """Return a copy that shares everything but its children, which are shadows."""
    kind = type(module)
    copied = kind.__new__(kind)
    vars(copied).update(vars(module))
    children = module.named_children()
    vars(copied)["_modules"] = {
        child_name: _shadow(child, tracer, inner_name(name, child_name)) for child_name, child in children
    }
    if name and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        copied.__class__ = type(f"Shadow{kind.__name__}", (_Shadow, kind), {"__module__": __name__})
        cast(_Shadow, copied).called_by = (tracer, name)
    return copied


def _followed(module: nn.Module) -> tuple[fx.Graph, fx.Node, Any]:
    """Return the graph of what the block does with its first input, that input, and what it returns."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    x = tracer.create_proxy("placeholder", "x", (), {})
    returned: Any = _shadow(module, tracer, "").forward(x)
    return graph, x.node, returned.node if isinstance(returned, fx.Proxy) else None


def trace(module: nn.Module, name: str) -> Block:
    """Find the branches of the module `name`.

    Raises:
        ConfigError: its forward cannot be traced, or is not made of independent branches and a merge.
    """
    try:
        graph, source, result = _followed(module)
    except Exception as error:
        raise _refused(name, f"its forward cannot be followed ({type(error).__name__}: {error})") from error
    if result is None:
        raise _refused(name, "it does not return one tensor")
    if any(isinstance(value, torch.Tensor) for node in graph.nodes for value in tree_leaves((node.args, node.kwargs))):
        raise _refused(name, "it uses parameters or buffers of its own; put them in a module")
    merge_node = _merge_above(result, name)
    kind, dim, ends = _merged(merge_node, name)
    closures = [_above(end) for end in ends]
    modules = [{str(node.target) for node in closure if node.op == "call_module"} for closure in closures]
    tail_modules = {str(node.target) for node in graph.nodes if node.op == "call_module"} - set().union(*modules)
    _check_independent(module, closures, [*modules, tail_modules], name)
    graphs = [_cut(graph, source, end) for end in ends]
    tail = fx.GraphModule(module, _cut(graph, merge_node, result))
    return Block([fx.GraphModule(module, part) for part in graphs], modules, kind, dim, tail, graphs)


def _merge_above(result: fx.Node, name: str) -> fx.Node:
    """Return the merge from which one path leads to the result."""
    node = result
    while not _is_merge(node):
        inputs = node.all_input_nodes
        if len(inputs) != 1 or node.op == "placeholder":
            raise _refused(name, "no concatenation or sum of branches was found in its forward")
        node = inputs[0]
    return node


def _is_merge(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _CONCATENATE or _is_sum(node))


def _is_sum(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _ADD or node.kwargs:
        return False
    return all(isinstance(arg, fx.Node) or arg == 0 for arg in node.args)


def _merged(node: fx.Node, name: str) -> tuple[Literal["concat", "sum"], int, list[fx.Node]]:
    if node.target not in _CONCATENATE:
        return "sum", 0, _addends(node)
    tensors: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    if not isinstance(tensors, list | tuple) or not all(isinstance(part, fx.Node) for part in tensors):
        raise _refused(name, "what it concatenates cannot be told")
    if not isinstance(dim, int):
        raise _refused(name, "along which dimension it concatenates cannot be told")
    return "concat", dim, list(tensors)


def _addends(node: fx.Node) -> list[fx.Node]:
    """Return the addends of a sum; of nested sums too, if nothing else uses them."""
    found: list[fx.Node] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            found += _addends(arg) if _is_sum(arg) and len(arg.users) == 1 else [arg]
    return found


def _above(end: fx.Node) -> set[fx.Node]:
    """Return the nodes that a branch computes, from the block's input to its end."""
    found: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _check_independent(module: nn.Module, closures: list[set[fx.Node]], modules: list[set[str]], name: str) -> None:
    seen: dict[fx.Node, int] = {}
    for index, closure in enumerate(closures):
        for node in closure:
            if node in seen:
                raise _refused(name, f"branches {seen[node]} and {index} both use {node.name!r}")
            seen[node] = index
    owner: dict[int, int] = {}
    for index, names in enumerate(modules):
        for part in {inner for target in names for inner in module.get_submodule(target).modules()}:
            tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if any(owner.setdefault(id(tensor), index) != index for tensor in tensors):
                raise _refused(name, "some of its branches share parameters")


def _cut(graph: fx.Graph, source: fx.Node, end: fx.Node) -> fx.Graph:
    """Return the part of a graph from one node, the new input, to another, the output."""
    part = fx.Graph()
    made = {source: part.placeholder("x")}
    between = _above_until(end, source)
    for node in graph.nodes:
        if node in between:
            made[node] = part.node_copy(node, lambda old: made[old])
    part.output(made[end])
    return part


def _above_until(end: fx.Node, source: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node is not source and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"tensor_plan: {name!r} cannot be split into branches: {why}. A block in this style calls independent branches "
        "of its one input and concatenates or adds up what they return; "
        "orchestray.trainers.parallel.tensor.branches.Branches is one."
    )
