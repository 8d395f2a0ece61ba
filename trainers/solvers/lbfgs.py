"""L-BFGS: the product of BFGS's inverse Hessian with a vector, from the last few steps."""

from __future__ import annotations

from torch import Tensor

from orchestray.trainers.solvers.base import Changes, number
from orchestray.trainers.solvers.bfgs import LEAST_CURVATURE
from orchestray.trainers.solvers.line_search import LineSearchSolver, Searched


class Pairs:
    """The last steps and the changes of the gradient along them: rows of two tensors of a solver's state."""

    def __init__(self, steps: Tensor, changes: Tensor, count: Tensor) -> None:
        """
        Args:
            steps: memory of the steps, [history, n].
            changes: memory of the changes, [history, n].
            count: number of pairs ever added, [].
        """
        self._steps, self._changes, self._count = steps, changes, count

    @staticmethod
    def fresh(x: Tensor, history: int) -> dict[str, Tensor]:
        """Return the state that holds no pairs yet."""
        rows = {name: x.new_zeros(history, x.numel()) for name in ("steps", "changes")}
        return {**rows, "pairs": number(x)}

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Pairs:
        """Return the pairs in a solver's state."""
        return cls(state["steps"], state["changes"], state["pairs"])

    def add(self, step: Tensor, change: Tensor, *, is_first: bool = False) -> Changes:
        """Return the changes of the state by one more pair; none if the curvature along it is not positive.

        Args:
            step: the step.
            change: change of the gradient along it.
            is_first: True if the pairs so far do not count any more.
        """
        if float(step @ change) <= LEAST_CURVATURE * float(step.norm() * change.norm()):
            return []
        count = 0 if is_first else int(self._count)
        row = count % len(self._steps)
        return [(self._steps[row], step), (self._changes[row], change), (self._count, count + 1.0)]

    def times(self, vector: Tensor) -> Tensor:
        """Return the product of the inverse Hessian with a vector; the vector itself without pairs.

        The recursion in two loops of Nocedal and Wright, "Numerical Optimization" (2006), algorithm 7.4, with the first
        matrix of equation 7.20.
        """
        count, history = int(self._count), len(self._steps)
        newest_first = [number % history for number in range(count - 1, max(-1, count - 1 - history), -1)]
        left, factors = vector.clone(), []
        for row in newest_first:
            step, change = self._steps[row], self._changes[row]
            factor = float(step @ left) / float(step @ change)
            left -= factor * change
            factors.append(factor)
        if newest_first:
            step, change = self._steps[newest_first[0]], self._changes[newest_first[0]]
            left *= float(step @ change) / float(change @ change)
        for row, factor in zip(reversed(newest_first), reversed(factors), strict=True):
            step, change = self._steps[row], self._changes[row]
            left += (factor - float(change @ left) / float(step @ change)) * step
        return left


class Lbfgs(LineSearchSolver):
    """L-BFGS (Liu and Nocedal, 1989, "On the limited memory BFGS method for large scale optimization").

    It keeps `history` steps and as many changes of the gradient.
    """

    def __init__(self, history: int = 10) -> None:
        super().__init__()
        self._history = history

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().fresh(x), **Pairs.fresh(x, self._history)}

    def direction(self, gradient: Tensor) -> Tensor:
        return -Pairs.of(self.state).times(gradient)

    def learn(self, made: Searched, *, is_first: bool) -> Changes:
        added = Pairs.of(self.state).add(made.step, made.change, is_first=is_first)
        return added or ([(self.state["learned"], 0.0)] if is_first else [])
