"""Floating point operations as papers count them: those of products of matrices and convolutions, and of transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orchestray.platform.data.nested import map_tensors
from orchestray.trainers.analysis.formulas import PRODUCTS, TRANSFORMS
from orchestray.trainers.analysis.graph import OperatorGraph
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.analysis.unfused import unfused

_META = torch.device("meta")


@dataclass(frozen=True)
class Flops:
    """The floating point operations of a forward pass, as far as they can be counted."""

    counted: int
    """Number of operations of convolutions, products of matrices and Fourier transforms; a multiplication and an
    addition count as two.
    """
    uncounted: tuple[str, ...] = ()
    """Names of the operations that have no formula, so that the number may be too small."""


def flops_of(graph: OperatorGraph) -> int:
    """Return two operations for each multiplication of products and convolutions, and the work of Fourier transforms.

    The work of a graph, W, has all other operations as well, and one addition less for each sum.
    """
    products = sum(each.cost.multiplications for each in graph.operations if each.name in PRODUCTS)
    return 2 * products + sum(each.cost.work for each in graph.operations if each.name in TRANSFORMS)


def flops(network: nn.Module, *args: Any, **kwargs: Any) -> Flops:
    """Return the operations of a forward pass.

    They are counted on the `meta` device, which computes nothing and takes a fused layer apart into products. A network
    that needs values (`.item()`) is run where it is, with those fused kernels off that no counter sees into.

    Args:
        network: any module.
        args: its inputs.
        kwargs: its named inputs.
    """
    state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device=_META) for name, tensor in state.items()}
    with contextlib.suppress(Exception):  # of any kind: the network's own code
        moved = map_tensors(lambda one: one.to(_META), (args, kwargs))
        return _counted(lambda: torch.func.functional_call(network, on_meta, *moved))
    with unfused():
        return _counted(lambda: network(*args, **kwargs))


def _counted(forward: Callable[[], Any]) -> Flops:
    with torch.no_grad(), Recorder(has_layers=False) as recorder:
        forward()
    graph = recorder.graph
    return Flops(flops_of(graph), tuple(sorted(graph.uncounted)))
