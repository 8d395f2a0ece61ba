"""Stand-ins for values while a forward pass is recorded: using one adds to the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx

CONCRETE_METHODS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "__len__"),
    *("element_size", "is_contiguous", "storage_offset", "__hash__", "__repr__", "__format__"),
}
CONCRETE_PROPERTIES = {"shape", "ndim", "dtype", "layout", "requires_grad", "is_sparse", "is_leaf", "names"}
"""Properties of a parameter or buffer that tracing knows. Its device is not among them: the model may move."""


class Value(fx.Proxy):
    """A stand-in for a value that is not known yet."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def _assign(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._assign(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._assign(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._assign(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._assign(operator.itruediv, other)

    def __int__(self) -> int:
        raise cast(Any, self.tracer).error("it makes a Python number of a value that is known only when it runs")

    def __float__(self) -> float:
        return float(int(self))


class Given(Value):
    """A stand-in for an input of the model, of which the number of dimensions may be known."""

    def __init__(self, node: fx.Node, tracer: Any, dims: int | None) -> None:
        super().__init__(node, tracer)
        self.known_dims = dims

    def __getattr__(self, name: str) -> Any:
        if self.known_dims is not None and name in {"ndim", "dim", "ndimension"}:
            return self.known_dims if name == "ndim" else lambda: self.known_dims
        return super().__getattr__(name)


class Known(Value):
    """A stand-in for a parameter or a buffer: its shape is known, its values are not."""

    def __init__(self, node: fx.Node, tracer: Any, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.known_tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in CONCRETE_PROPERTIES or (name in CONCRETE_METHODS and not name.startswith("__")):
            return getattr(self.known_tensor, name)
        return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.known_tensor)
