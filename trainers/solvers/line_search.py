"""Line searches: how far to go along a direction, and the solvers that go to a point of the strong Wolfe conditions.

J. Nocedal, S. Wright, "Numerical Optimization" (2006), algorithms 3.1, 3.5 and 3.6.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from orchestray.trainers.solvers.base import Changes, Oracle, Solver, Taken, number

_DECREASE = 1e-4
"""Part of the decrease that the slope promises which a point must reach."""
_MOST_POINTS = 25
_GROWTH = 4.0


@dataclass(frozen=True)
class Point:
    """A point on the line, with the function and its gradient there."""

    length: float
    """Length of the step from the start, as a multiple of the direction."""
    value: float
    slope: float
    """Derivative along the direction."""
    x: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Searched:
    """A step that a line search has found."""

    direction: Tensor
    gradient: Tensor
    """Gradient at the start of the step."""
    step: Tensor
    end: Point

    @property
    def change(self) -> Tensor:
        """Change of the gradient along the step."""
        return self.end.gradient - self.gradient


class Line:
    """A line from a point along a direction of descent, on which a point is searched."""

    def __init__(self, oracle: Oracle, x: Tensor, value: float, gradient: Tensor, direction: Tensor) -> None:
        """
        Args:
            oracle: function to minimise.
            x: start of the line.
            value: function there.
            gradient: gradient there.
            direction: direction, along which the function falls at first.
        """
        self._oracle, self._direction = oracle, direction
        self.start = Point(0.0, value, float(gradient @ direction), x, gradient)
        self.num_points = 0
        """Number of points at which the function was evaluated."""

    def strong_wolfe(self, first: float, curvature: float) -> Point | None:
        """Return a point that satisfies the strong Wolfe conditions, or the best one that is low enough; None: none is.

        Args:
            first: length that is tried first.
            curvature: largest part of the start's slope that may be left, between 0 and 1.
        """
        before, length = self.start, first
        while self.num_points < _MOST_POINTS:
            here = self._at(length)
            if not self._is_low(here) or (before is not self.start and self._is_above(here, before)):
                return self._between(before, here, curvature)
            if abs(here.slope) <= -curvature * self.start.slope:
                return here
            if here.slope >= 0:
                return self._between(here, before, curvature)
            before, length = here, _GROWTH * length
        return before if before is not self.start else None

    def backtrack(self, first: float) -> tuple[float, Tensor, float] | None:
        """Return length, parameters and function of the first point that is low enough, of `first`, half of it, ...

        None: there is none.
        """
        length = first
        while self.num_points < _MOST_POINTS:
            self.num_points += 1
            x = self.start.x + length * self._direction
            value = self._oracle.value(x)
            rounding = self._oracle.resolution * abs(self.start.value)
            if value <= self.start.value + _DECREASE * length * self.start.slope + rounding:
                return length, x, value
            length /= 2
        return None

    def _at(self, length: float) -> Point:
        self.num_points += 1
        x = self.start.x + length * self._direction
        value, gradient = self._oracle.gradient(x)
        return Point(length, value, float(gradient @ self._direction), x, gradient)

    def _is_low(self, here: Point) -> bool:
        """Return True if a point is low enough; by its slope if rounding hides the decrease.

        The second condition holds on a quadratic wherever the first does (W. Hager, H. Zhang, "A new conjugate gradient
        method with guaranteed descent and an efficient line search", 2005, equation 4.1).
        """
        if not math.isfinite(here.slope):
            return False
        start = self.start
        if here.value <= start.value + _DECREASE * here.length * start.slope:
            return True
        return not self._is_above(here, start) and here.slope <= (2 * _DECREASE - 1) * start.slope

    def _is_above(self, here: Point, other: Point) -> bool:
        """Return True if a point is above another by more than rounding."""
        return not here.value <= other.value + self._oracle.resolution * abs(self.start.value)

    def _between(self, low: Point, high: Point, curvature: float) -> Point | None:
        """Return a point between two, of which the first is low enough and the function falls from it to the other."""
        while self.num_points < _MOST_POINTS and high.length != low.length:
            here = self._at(_minimum_of_cubic(low, high))
            if not self._is_low(here) or self._is_above(here, low):
                high = here
            else:
                if abs(here.slope) <= -curvature * self.start.slope:
                    return here
                if here.slope * (high.length - low.length) >= 0:
                    high = low
                low = here
        return low if low is not self.start else None


def _minimum_of_cubic(low: Point, high: Point) -> float:
    """Return the minimum of the cubic through values and slopes of two points, well inside; else their middle."""
    width = high.length - low.length
    if math.isfinite(high.value) and math.isfinite(high.slope):
        # Nocedal and Wright, equation 3.59.
        first = low.slope + high.slope - 3 * (high.value - low.value) / width
        under_root = first * first - low.slope * high.slope
        if under_root >= 0:
            second = math.copysign(math.sqrt(under_root), width)
            if below := high.slope - low.slope + 2 * second:
                part = 1 - (high.slope + second - first) / below
                return low.length + min(0.9, max(0.1, part)) * width
    return low.length + width / 2


class LineSearchSolver(Solver):
    """A solver whose step ends at a point of the strong Wolfe conditions along a direction of its own.

    Value and gradient at that point are kept for the next step, which begins there.
    """

    curvature: ClassVar[float] = 0.9
    """Largest part of the slope that the line search may leave."""

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {"value": number(x), "gradient": x.new_zeros(x.numel()), "is_known": number(x), "learned": number(x)}

    @property
    def learned(self) -> int:
        """Number of steps since the start, or since the solver has forgotten what it knew."""
        return int(self.state["learned"])

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Return the direction to search along, if at least one step was learned from."""

    @abstractmethod
    def learn(self, made: Searched, *, is_first: bool) -> Changes:
        """Return the changes of the state by a step.

        Args:
            made: the step.
            is_first: True if nothing that was learned before counts any more.
        """

    def first_length(self, x: Tensor, gradient: Tensor, direction: Tensor, oracle: Oracle) -> float:
        """Return the length to try first: that of the direction itself, or one of length 1 without knowledge."""
        return 1.0 if self.learned else min(1.0, 1.0 / float(direction.norm()))

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        state = self.state
        if state["is_known"]:
            value, gradient = float(state["value"]), state["gradient"].clone()
        else:
            value, gradient = oracle.gradient(x)
        metrics = {"grad_norm": float(gradient.norm()), "step_length": 0.0, "evaluations": 0.0}
        if not metrics["grad_norm"] or not math.isfinite(metrics["grad_norm"]):
            return Taken(x, value, [], metrics)
        direction = self.direction(gradient) if self.learned else -gradient
        restarts = not float(gradient @ direction) < 0
        if restarts:
            direction = -gradient
        line = Line(oracle, x, value, gradient, direction)
        end = line.strong_wolfe(lr * self.first_length(x, gradient, direction, oracle), self.curvature)
        metrics["evaluations"] = float(line.num_points)
        if end is None:  # rounding hides the descent, or what was learned misleads: begin again from the gradient
            return Taken(x, value, [(state["learned"], 0.0), (state["is_known"], 0.0)], metrics)
        metrics["step_length"] = end.length
        changes: Changes = [(state["value"], end.value), (state["gradient"], end.gradient), (state["is_known"], 1.0)]
        changes += [(state["learned"], 1.0 if restarts else self.learned + 1.0)]
        made = Searched(direction, gradient, end.x - x, end)
        changes += self.learn(made, is_first=restarts or not self.learned)
        return Taken(end.x, value, changes, metrics)
