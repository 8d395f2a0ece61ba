"""Which weights of a parent a child begins with (E. Real et al., 2017, section 3.5: weight inheritance)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def inherited(parent: Mapping[str, Tensor], child: Mapping[str, Tensor], *, overlap: bool = False) -> dict[str, Tensor]:
    """The tensors that a child takes from its parent, by name: copies, to be loaded over the child's own.

    Args:
        parent: its state, by name.
        child: its own, untrained state.
        overlap: whether a tensor of the same name and another shape takes the part that both have: of a layer that was
            widened the old channels, of a larger kernel the corner. The rest stays the child's own.
    """
    taken: dict[str, Tensor] = {}
    for name, own in child.items():
        given = parent.get(name)
        if given is None or given.dtype != own.dtype:
            continue
        if given.shape == own.shape:
            taken[name] = given.detach().clone()
        elif overlap and given.dim() == own.dim():
            both = tuple(slice(0, min(pair)) for pair in zip(given.shape, own.shape, strict=True))
            taken[name] = own.detach().clone()
            taken[name][both] = given.detach()[both]
    return taken
