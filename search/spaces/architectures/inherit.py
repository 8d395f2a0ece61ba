"""Weight inheritance from parent to child networks (E. Real et al., 2017, section 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def inherited(parent: Mapping[str, Tensor], child: Mapping[str, Tensor], *, overlap: bool = False) -> dict[str, Tensor]:
    """Return copies of the tensors that a child takes over from its parent by name, to be loaded over the child's own.

    Args:
        parent: state of the parent, by name.
        child: untrained state of the child.
        overlap: True to also copy the common part of tensors of the same name but different shape: the old channels of
            a widened layer, the corner of a larger kernel. The child keeps its own values for the rest.
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
