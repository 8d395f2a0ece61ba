"""The parts of `transformers` that a recording takes whole: functions that depend on the data, and its containers.

Attention masks are made by such functions: without padding there is no mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

_MASKS = "transformers.masking_utils"
_STAND_IN = object()


def prepare_functions(model: nn.Module) -> None:
    """Make the functions that the model's code imports from `transformers.masking_utils` ready for a recording.

    They do as before for all values but stand-ins, for other models and other threads as well.
    """
    if _MASKS not in sys.modules:
        return
    for place in {type(module).__module__ for module in model.modules()}:
        names = vars(sys.modules[place]) if place in sys.modules else {}
        for name, function in list(names.items()):
            if name.startswith("create_") and getattr(function, "__module__", "") == _MASKS:
                names[name] = function if hasattr(function, "_is_called_whole") else _called_whole(function)


def _called_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        proxies = [leaf for leaf in leaves if isinstance(leaf, fx.Proxy)]
        if not proxies:
            return function(*args, **kwargs)
        others = tuple(_STAND_IN if isinstance(leaf, fx.Proxy) else leaf for leaf in leaves)
        whole = _Call(function, others, structure)
        return proxies[0].tracer.create_proxy("call_function", whole, tuple(proxies), {})

    call._is_called_whole = True  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class _Call:
    """A call of a function with all arguments but those that are values of the graph."""

    function: Callable[..., Any]
    others: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *values: Any) -> Any:
        there = iter(values)
        leaves = [next(there) if leaf is _STAND_IN else leaf for leaf in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Built:
    """A function that makes a container of its parts."""

    structure: pytree.TreeSpec

    @property
    def __name__(self) -> str:
        return "built"

    def __call__(self, *parts: Any) -> Any:
        return pytree.tree_unflatten(list(parts), self.structure)
