"""Floating point operations as papers count them: those of products of matrices and convolutions, and of transforms."""

from __future__ import annotations

from orchestray.trainers.analysis.formulas import PRODUCTS, TRANSFORMS
from orchestray.trainers.analysis.graph import OperatorGraph


def flops_of(graph: OperatorGraph) -> int:
    """Return two operations for each multiplication of products and convolutions, and the work of Fourier transforms.

    The work of a graph, W, has all other operations as well, and one addition less for each sum.
    """
    products = sum(each.cost.multiplications for each in graph.operations if each.name in PRODUCTS)
    return 2 * products + sum(each.cost.work for each in graph.operations if each.name in TRANSFORMS)
