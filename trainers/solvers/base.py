"""The interface of solvers, and of the function that they minimise. Each solver has a file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""The product of a symmetric matrix of curvature with a vector, float64 [n] -> float64 [n]."""
Changes = list[tuple[Tensor, Tensor | float]]
"""Tensors of a solver's state, or parts of them, each with the values that it gets."""


class Oracle(Protocol):
    """A function of n parameters with its derivatives; vectors are float64 [n], in the order of the model's parameters.

    Every replica calls the same methods with the same bits, and gets the same bits.
    """

    resolution: float
    """Relative distance of two values between which rounding alone may decide."""
    num_batches: int
    """Number of batches of the whole data."""

    def value(self, x: Tensor) -> float:
        """Return the function at `x`; infinite or NaN where it cannot be computed."""

    def gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the function and its gradient at `x`."""

    def hessian(self, x: Tensor) -> Product:
        """Return the product of the Hessian at `x` with a vector; valid until another method is called."""

    def gauss_newton(self, x: Tensor) -> Product:
        """Return the product of the Gauss-Newton matrix at `x` with a vector; valid until another method is called.

        It is J^T H J, with the Jacobian J of the model's outputs and the Hessian H of the loss of these outputs
        (Schraudolph 2002): positive semi-definite where the loss is convex in the outputs.
        """

    def whole_gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of the mean over the whole data, of which the function may be one batch."""


@dataclass(frozen=True)
class Taken:
    """A step that a solver has found, before it is made."""

    x: Tensor
    """Parameters after the step."""
    value: float
    """Function before the step, at the parameters that the solver was given."""
    changes: Changes
    """Changes of the solver's state that belong to the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Entries of the step's metric line."""


class Solver(ABC):
    """A method that minimises a function, step by step.

    All that it knows of earlier steps is in `state`, named tensors of fixed shapes, so that a run resumes exactly.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def begin(self, x: Tensor) -> None:
        """Start without a memory of earlier steps.

        Args:
            x: vector as long as the parameters, on their device.
        """
        self.state = self.fresh(x)

    @abstractmethod
    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step, for parameters like `x`."""

    @abstractmethod
    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        """Return the step from `x`. Nothing changes yet: a step that fails midway leaves the solver as it was.

        Args:
            x: parameters.
            oracle: function to minimise.
            lr: learning rate of this step: a factor on the step, or on the first one that a line search tries.
        """

    def make(self, taken: Taken) -> None:
        """Remember a step that was found, as the one that is made."""
        for target, value in taken.changes:
            if isinstance(value, Tensor):
                target.copy_(value)
            else:
                target.fill_(value)


def number(like: Tensor) -> Tensor:
    """Return a number of the state, 0, on the device of `like`."""
    return like.new_zeros(())
