"""The places where a model must not be cut: two workers would hold separate
copies of memory that one process shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn

from orchestray.trainers.parallel.pipeline.tracing import without_gradients

_VIEWS = {
    *(
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "squeeze",
        "unsqueeze",
        "contiguous",
    ),
    *("transpose", "t", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT", "H", "mH", "adjoint"),
    *("expand", "expand_as", "broadcast_to", "broadcast_tensors", "narrow", "select", "getitem", "diagonal", "unfold"),
    *("chunk", "split", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit", "unbind", "as_strided"),
    *("detach", "data", "real", "imag", "to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "positive"),
    *("requires_grad_", "alias", "view_as_real", "view_as_complex", "atleast_1d", "atleast_2d", "atleast_3d", "conj"),
    *("__getitem__", "rot90", "pad", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "type_as"),
}
"""Operations whose result may be the memory of their input; dropout's is, in evaluation."""
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_ASSIGNMENTS = {
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"),
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
}
_Called = Callable[[fx.Node], nn.Module | None]


def forbidden_cuts(nodes: Sequence[fx.Node], called: _Called) -> dict[int, str]:
    """Return the layers that must not begin a stage, each with the reason: a sentence.

    Args:
        nodes: nodes of the graph, in order, with their layers.
        called: function from a node to the module it calls.
    """
    return _changed_after(nodes, called) | _buffers_apart(nodes, called)


def _buffers_apart(nodes: Sequence[fx.Node], called: _Called) -> dict[int, str]:
    """Forbid cuts between two calls of a module with buffers: each stage would change its own copy."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for node in nodes:
        module = called(node)
        for path, buffer in module.named_buffers(str(node.target)) if module is not None else ():
            uses.setdefault(id(buffer), []).append((int(node.meta["layer"]), path))
    found: dict[int, str] = {}
    for places in uses.values():
        for (first, name), (second, other) in pairwise(places):
            also = f" (there it is {other})" if other != name else ""
            for cut in range(first + 1, second + 1):
                found.setdefault(
                    cut,
                    f"The buffer {name} would be in two stages of the pipeline{also}, and each would change its own "
                    "copy. Cut so that one stage has both calls of its module (strategy.network.split), or give each "
                    "place a module of its own.",
                )
    return found


def _changed_after(nodes: Sequence[fx.Node], called: _Called) -> dict[int, str]:
    """Forbid cuts between an alias of some memory and a change in place, if the other name is used after the change."""
    order = {node: position for position, node in enumerate(nodes)}
    last_use = {node: max((order.get(user, len(order)) for user in node.users), default=-1) for node in order}
    memory = _Memory(nodes, called)
    found: dict[int, str] = {}
    for node in nodes:
        for changed in _changes(node, called(node)):
            for other in memory.sharing(changed):
                if other is changed or other is node or order.get(other, -1) > order[node]:
                    continue
                if last_use.get(other, -1) <= order[node]:
                    continue
                for cut in range(max(_layer(changed), _layer(other)) + 1, _layer(node) + 1):
                    found.setdefault(
                        cut,
                        f"What is changed in place at {node.meta.get('where')} is used under another name later, and "
                        "would be in another stage of the pipeline than the change. Cut elsewhere "
                        "(strategy.network.split), or do not change it in place.",
                    )
    return found


class _Memory:
    """A map of the values that may share memory."""

    def __init__(self, nodes: Sequence[fx.Node], called: _Called) -> None:
        self._of: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            sources = [*_changes(node, called(node))]
            if _may_view(node, called(node)):
                sources += node.all_input_nodes
            for source in sources:
                self._join(node, source)

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        return self._of.get(node, [node])

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        a, b = self._of.setdefault(one, [one]), self._of.setdefault(other, [other])
        if a is not b:
            a += b
            for node in b:
                self._of[node] = a


def _layer(node: fx.Node) -> int:
    return 0 if node.op == "placeholder" else int(node.meta["layer"])


def _unwrapped(node: fx.Node) -> tuple[str, Any, tuple[Any, ...]]:
    """Return op, target and arguments of a call, also of one that runs with gradients off."""
    if node.target is not without_gradients:
        return node.op, node.target, node.args
    target, *args = node.args
    op = "call_method" if isinstance(target, str) else "call_module" if isinstance(target, fx.Node) else "call_function"
    return op, target, tuple(args)


def _changes(node: fx.Node, module: nn.Module | None) -> Iterator[fx.Node]:
    """Yield the values that a node may change in place."""
    op, target, args = _unwrapped(node)
    values = [arg for arg in args if isinstance(arg, fx.Node)]
    if op == "call_module":
        if module is not None and any(getattr(part, "inplace", False) is True for part in module.modules()):
            yield from values
        return
    if op not in {"call_function", "call_method"}:
        return
    if isinstance(node.kwargs.get("out"), fx.Node):
        yield node.kwargs["out"]  # type: ignore[misc]
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    is_named = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if values and (is_named or name in _ASSIGNMENTS or node.kwargs.get("inplace") not in (None, False)):
        yield values[0]


def _may_view(node: fx.Node, module: nn.Module | None) -> bool:
    op, target, args = _unwrapped(node)
    if op == "call_module":
        if module is None:
            return False
        is_torchs = all(type(part).__module__.startswith("torch.nn.") for part in module.modules())
        return not is_torchs or any(isinstance(part, _VIEW_MODULES) for part in module.modules())
    if op == "call_method":
        return target in _VIEWS
    if op != "call_function":
        return False
    if target is getattr:
        return args[1] in _VIEWS
    is_torchs = (getattr(target, "__module__", None) or "torch").startswith(("torch", "_operator", "builtins", "math"))
    return not is_torchs or getattr(target, "__name__", "") in _VIEWS
