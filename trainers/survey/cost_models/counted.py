"""A training step in numbers: its operations, its bytes and its products of matrices, counted without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from orchestray.trainers.analysis.products import Product
from orchestray.trainers.analysis.trace import Recorder


@dataclass(frozen=True)
class Counted:
    """The forward and backward pass of a mini-batch, counted."""

    work: int
    """Scalar operations; a multiplication and an addition are two."""
    num_bytes: int
    """Bytes that its operations read and write."""
    products: tuple[Product, ...]
    parameter_bytes: int
    """Bytes of the trained parameters, and so of their gradients."""


def counted(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Counted:
    """Count a forward and a backward pass.

    Args:
        forward: returns the loss; with a model and inputs on `meta`, nothing is computed.
        parameters: parameters of the model; their gradients are dropped, as additions to them would be counted.
    """
    trained = [each for each in parameters if each.requires_grad]
    for each in trained:
        each.grad = None
    with Recorder() as recorder:
        forward().backward()  # type: ignore[no-untyped-call]
    operations = recorder.graph.operations
    return Counted(
        recorder.graph.work,
        sum(each.num_bytes for each in operations),
        tuple(product for _, product in recorder.products),
        sum(each.numel() * each.element_size() for each in trained),
    )
