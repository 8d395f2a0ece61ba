"""A search for modules that draw random numbers by themselves for a part of an activation, unlike one process.

`dropout` makes the known modules draw for the whole (`rng.draw_for_whole`). A forward that calls `functional.dropout`
or `torch.rand_like` itself draws as many numbers as it gets values. If it gets a part, the numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from orchestray.platform.process.alike import torch_state
from orchestray.trainers.core.buffers import untouched
from orchestray.trainers.core.every_tensor import every_tensor_in
from orchestray.trainers.core.inputs import call

Draws = dict[str, list[tuple[int, ...]]]
"""Shapes of what each module draws in a forward pass, by its name, in order."""

_SEED = 20
_KNOWN = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)
"""Modules that draw for the whole wherever they are split."""


def own_draws(model: nn.Module, inputs: Any) -> Draws:
    """Return what the modules of a model in the modes of training draw by themselves in a forward pass.

    Buffers and torch's generator are restored. If the parts are spread over a group, all its workers call this.
    An error of the model is raised, such as that of batch normalisation of one sample.

    Raises:
        PeerLostError: another worker of the group is gone.
    """
    found: Draws = {}
    inside: list[tuple[str, bool]] = []
    state = torch_state()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_entering(inside, name)))
        handles.append(module.register_forward_hook(_leaving(inside), always_call=True))
    try:
        torch.default_generator.manual_seed(_SEED)
        with torch.no_grad(), untouched(model), _Watch(inside, found):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
        torch.default_generator.set_state(state)
    return found


def _entering(inside: list[tuple[str, bool]], name: str) -> Callable[..., None]:
    def enter(module: nn.Module, _inputs: Any) -> None:
        is_known = isinstance(module, _KNOWN) or (bool(inside) and inside[-1][1])
        inside.append((name, is_known))

    return enter


def _leaving(inside: list[tuple[str, bool]]) -> Callable[..., None]:
    def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        inside.pop()

    return leave


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records every operation that draws, by the module in whose forward it is called."""

    def __init__(self, inside: Sequence[tuple[str, bool]], found: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = inside
        self._found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, which costs 1 s, to keep it out of what it never compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and self._inside and not self._inside[-1][1]:
            shapes = self._found.setdefault(self._inside[-1][0], [])
            shapes += [tuple(tensor.shape) for tensor in every_tensor_in(result)]
        return result


def drawn_for_parts(plain: Draws, ours: Draws) -> list[str]:
    """Return the names of the modules that draw for other shapes in the split model than in the plain one."""
    return [name for name in plain if ours.get(name, []) != plain[name]]


def drawn_warning(model: nn.Module, names: Sequence[str]) -> str:
    """Return the warning to the user about these modules; "" for none."""
    if not names:
        return ""
    shown = ", ".join(
        f"{name!r} ({type(model.get_submodule(name)).__name__})"
        if name
        else f"the model itself ({type(model).__name__})"
        for name in names
    )
    one = len(names) == 1
    return (
        f"{'Module' if one else 'Modules'} {shown} {'draws' if one else 'draw'} random numbers for a part of an "
        "activation that is split over the tensor workers (by functional.dropout or its like), not those that one "
        "process would draw, so the results depend on strategy.network.tensor. Use a module such as nn.Dropout, which "
        "draws for the whole, or leave the layers before it whole."
    )
