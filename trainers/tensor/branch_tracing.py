"""Finds the branches of a block in what its `forward` does, followed by `torch.fx`.

Imported only where a plan has blocks with branches.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from orchestray.platform.errors import ConfigError

_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)
_ADD = (operator.add, operator.iadd, torch.add)


@dataclass
class Block:
    """A block as branches of its input, a merge and what follows. Its modules are called, not copied."""

    branches: list[nn.Module]
    modules: list[set[str]]
    """That each branch calls, by their names in the block."""
    merge: Literal["concat", "sum"]
    dim: int
    """Along which outputs are concatenated."""
    tail: nn.Module
    graphs: list[fx.Graph]

    def on(self, module: nn.Module) -> list[nn.Module]:
        """The branches, with the modules of a copy of the block."""
        return [fx.GraphModule(module, graph) for graph in self.graphs]


class _Tracer(fx.Tracer):
    """Follows the block's own forward; what it calls stays a call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace(module: nn.Module, name: str) -> Block:
    """Find the branches of the module `name`.

    Raises:
        ConfigError: its forward cannot be followed, or is not made of independent branches and a merge.
    """
    try:
        graph = _Tracer().trace(module)
    except Exception as error:
        raise _refused(name, f"its forward cannot be followed ({type(error).__name__}: {error})") from error
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    if not isinstance(result, fx.Node):
        raise _refused(name, "it does not return one tensor")
    merge_node = _merge_above(result, name)
    kind, dim, ends = _merged(merge_node, name)
    closures = [_above(end) for end in ends]
    source = _source(graph, name)
    modules = [{str(node.target) for node in closure if node.op == "call_module"} for closure in closures]
    tail_modules = {str(node.target) for node in graph.nodes if node.op == "call_module"} - set().union(*modules)
    _check_independent(module, closures, [*modules, tail_modules], name)
    graphs = [_cut(graph, source, end) for end in ends]
    tail = fx.GraphModule(module, _cut(graph, merge_node, result))
    return Block([fx.GraphModule(module, part) for part in graphs], modules, kind, dim, tail, graphs)


def _merge_above(result: fx.Node, name: str) -> fx.Node:
    """The merge, from which one path leads to the result."""
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
    """Of a sum of sums that nobody else uses."""
    found: list[fx.Node] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            found += _addends(arg) if _is_sum(arg) and len(arg.users) == 1 else [arg]
    return found


def _above(end: fx.Node) -> set[fx.Node]:
    """What a branch computes, from the block's input to its end."""
    found: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _source(graph: fx.Graph, name: str) -> fx.Node:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    used = [node for node in inputs if node.users]
    if not inputs or len(used) > 1 or (used and used[0] is not inputs[0]):
        raise _refused(name, "it uses several inputs")
    if any(node.op == "get_attr" for node in graph.nodes):
        raise _refused(name, "it uses parameters or buffers of its own; put them in a module")
    return inputs[0]


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
    """The part of a graph from one node, the new input, to another, the output."""
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
        "of its one input and concatenates or adds up what they return; orchestray.trainers.tensor.branches.Branches "
        "is one."
    )
