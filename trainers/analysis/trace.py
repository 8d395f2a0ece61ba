"""The recording of a computation as a graph of operations, on whatever device: on `meta` nothing is computed."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestray.trainers.analysis.cost import NOTHING, Cost
from orchestray.trainers.analysis.formulas import FORMULAS, MAKERS, MOVES, RANDOM, pointwise
from orchestray.trainers.analysis.graph import Operation, OperatorGraph
from orchestray.trainers.analysis.products import Product, products_of
from orchestray.trainers.analysis.rarer_formulas import ELEMENTWISE


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which torch's operations are recorded, those of a backward pass as well.

    Args:
        has_layers: False to leave out which module each belongs to. Finding that keeps parts of autograd's graph longer
            than a step without it does.

    Attributes:
        products: products of matrices, each with the name of its layer.
    """

    def __init__(self, *, has_layers: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[str, Product]] = []
        self._operations: list[Operation] = []
        self._uncounted: Counter[str] = Counter()
        self._writers: dict[int, int] = {}
        """Maps a storage to the operation that has written to it last."""
        self._kept: list[Any] = []
        """All storages: the address of one that is gone would be another's."""
        self._entered = _Entered() if has_layers else None
        self._made: list[int] = []
        """Numbers of autograd's nodes at each change of the layer of the forward pass, rising."""
        self._makers: list[str] = []
        """Layers that made the nodes from each of these numbers on."""
        self._last_made = _get_sequence_nr() - 1

    def __enter__(self) -> Self:
        if self._entered is not None:
            self._entered.begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._entered is not None:
            self._entered.end()

    @property
    def layer(self) -> str:
        """Name of the innermost module whose forward or backward pass is under way, after the model's class.

        In the backward pass it is the module that made the node of autograd whose gradient is computed.
        """
        if self._entered is None:
            return ""
        if (number := _node_number()) is None:
            return self._entered.innermost
        place = bisect_right(self._made, number) - 1
        return self._makers[place] if place >= 0 else ""

    @property
    def graph(self) -> OperatorGraph:
        """Graph of the operations so far."""
        return OperatorGraph(tuple(self._operations), dict(self._uncounted))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self._note_maker()
        out = func(*args, **(kwargs or {}))
        if sparse := [each for each in tree_leaves((args, kwargs, out)) if _is_sparse(each)]:
            self._uncounted[f"{_name(func)} of {str(sparse[0].layout).removeprefix('torch.')} tensors"] += 1
            return out
        read, written = _tensors((args, kwargs)), _tensors(out)
        if not written or func.is_view or torch.Tag.inplace_view in func.tags or _is_alias(func, read, written):
            return out
        cost = self._cost(func, args, kwargs or {}, out)
        self.products += [(self.layer, product) for product in products_of(func.overloadpacket, args, out)]
        sources = [] if func.overloadpacket in MAKERS else read
        needs = {self._writers[key] for each in sources if (key := _storage(each)) in self._writers}
        by_storage = {(_storage(each), each.numel()): each for each in (*sources, *written)}
        self._operations.append(
            Operation(
                _name(func),
                cost,
                tuple(sorted(needs)),
                sum(each.numel() * each.element_size() for each in by_storage.values()),
                self.layer,
                _node_number() is not None and not (self._entered is not None and self._entered.in_forward),
            )
        )
        for each in written:
            self._kept.append(each.untyped_storage())
            self._writers[_storage(each)] = len(self._operations) - 1
        return out

    def _note_maker(self) -> None:
        """Keep which layer makes the node of the operation that is about to run, if it has one."""
        if self._entered is None or _node_number() is not None or (number := _get_sequence_nr() - 1) == self._last_made:
            return
        self._last_made = number
        if not self._makers or self._makers[-1] != self.layer:
            self._makers.append(self.layer)
            self._made.append(number)

    def _cost(self, func: Any, args: Any, kwargs: Any, out: Any) -> Cost:
        packet = func.overloadpacket
        if (formula := FORMULAS.get(packet)) is not None:
            return formula(*args, **kwargs, out=out)
        if packet in RANDOM:
            return Cost(others=out.numel(), depth=1)
        if packet in MOVES or packet in MAKERS:  # torch calls some of them pointwise, such as `clone`
            return NOTHING
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor) and (torch.Tag.pointwise in func.tags or _name(func) in ELEMENTWISE):
            return pointwise(_name(func), first)
        self._uncounted[_name(func)] += 1
        return NOTHING


class _Entered:
    """The modules whose forward passes are under way.

    Unlike torch's `ModuleTracker`, it hooks no gradients: `torch.autograd.grad` works within a forward pass.
    """

    def __init__(self) -> None:
        self._names: dict[nn.Module, str] = {}
        self._stack: list[tuple[str, bool]] = []
        """Name of each, and True if it was entered within a backward pass, to compute it again."""
        self._hooks: list[Any] = []

    @property
    def innermost(self) -> str:
        """Name of the innermost module, after the model's class; empty: there is none."""
        return self._stack[-1][0] if self._stack else ""

    @property
    def in_forward(self) -> bool:
        """True in a forward pass, whatever gradients it computes."""
        return bool(self._stack) and not self._stack[0][1]

    def begin(self) -> None:
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._hooks = [register_module_forward_pre_hook(self._enter), leave]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if module not in self._names:
            kind = type(module).__name__
            self._names |= {one: f"{kind}.{name}" if name else kind for name, one in module.named_modules()}
        self._stack.append((self._names[module], _node_number() is not None))

    def _leave(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._stack.pop()


def _node_number() -> int | None:
    """Return the number of autograd's node whose gradient is computed; None outside of a backward pass."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def _is_alias(func: Any, read: list[Tensor], written: list[Tensor]) -> bool:
    """Return True if an operation returns what it got, and writes nothing."""
    known = {_storage(each) for each in read}
    return not func._schema.is_mutable and all(_storage(each) in known for each in written)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout != torch.strided


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(func: Any) -> str:
    return str(func.overloadpacket).rpartition(".")[2]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the operations within; `graph` of what this yields has them."""
    with Recorder() as recorder:
        yield recorder


def traced(compute: Callable[[], Any]) -> OperatorGraph:
    """Return the graph of what a function computes."""
    with recording() as recorder:
        compute()
    return recorder.graph
