"""Backpropagation through time in little memory: which states to store, and what to compute again.

Gruslys et al., "Memory-Efficient Backpropagation Through Time", 2016: the least number of forward steps for a number of
stored states is the value of a dynamic programme, and its choices are the plan. A stored state is either what a step
hands to the next (`hidden`), or all that the backward pass of a step needs (`internal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["hidden", "internal"]
States: TypeAlias = tuple[Tensor, ...]
Step: TypeAlias = Callable[[int, States], tuple[States, Tensor]]
"""A function from the number of a step and the states before it to those after it, and to the loss of the step."""


class Plan:
    """The plan for each length and each number of stored states: C(t, m) of the paper, and the y that gives it.

    Hidden states (section 3.1): C(t, m) is the least of y + C(t - y, m - 1) + C(y, m): go y steps, store the state, do
    what is after it, then what is before it. Internal states (section 3.2): the least of y + C(t - y, m - 1) +
    C(y - 1, m). Step y, which is stored, is not computed again. With one state, C(t, 1) = t (t + 1) / 2.
    """

    def __init__(self, num_steps: int, num_states: int, kind: Kind = "internal") -> None:
        """
        Args:
            num_steps: largest number of steps.
            num_states: largest number of stored states, at least 1.
            kind: what is stored.

        Raises:
            ValueError: there are no steps, or no state can be stored.
        """
        if num_steps < 1 or num_states < 1:
            raise ValueError(f"a plan needs a step and a state at least, got {num_steps} and {num_states}")
        self.kind = kind
        self.num_steps, self.num_states = num_steps, min(num_states, num_steps)
        steps = np.arange(num_steps + 1, dtype=np.int64)
        one = steps * (steps + 1) // 2
        self._costs, self._first = [one, one], [steps, steps]
        for _ in range(1, self.num_states):
            costs, first = _with_another_state(self._costs[-1], kind)
            self._costs.append(costs)
            self._first.append(first)

    def forward_steps(self, num_steps: int, num_states: int) -> int:
        """Return the least number of forward steps with which the gradients of some steps are computed."""
        return int(self._costs[min(num_states, self.num_states)][num_steps])

    def first_stored(self, num_steps: int, num_states: int) -> int:
        """Return how many steps to go before a state is stored."""
        return int(self._first[min(num_states, self.num_states)][num_steps])


def _with_another_state(costs: NDArray[np.int64], kind: Kind) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the costs by number of steps with one state more than `costs` are for, and the best y for each."""
    found, first = costs.copy(), np.arange(len(costs), dtype=np.int64)
    least = 2 if kind == "hidden" else 1  # one step alone stores no state for another
    for steps in range(least, len(costs)):
        last = steps - 1 if kind == "hidden" else steps
        y = np.arange(1, last + 1)
        before = found[1 : last + 1] if kind == "hidden" else found[0:last]
        sums = y + costs[steps - last : steps][::-1] + before
        best = int(sums.argmin())
        found[steps], first[steps] = sums[best], y[best]
    return found, first


@dataclass
class Counted:
    """The result of a pass, and what it took."""

    loss: Tensor
    """Sum of the losses of the steps."""
    forward_steps: int = 0
    """Forward steps, those that are done again included."""
    most_stored: int = 0
    """Largest number of states that were stored at once."""
    _stored: int = 0

    def store(self, change: int) -> None:
        self._stored += change
        self.most_stored = max(self.most_stored, self._stored)


def backpropagate(step: Step, states: States, parameters: Iterable[Tensor], plan: Plan) -> Counted:
    """Add the gradients of the sum of the losses of all steps to `grad` of the parameters and of the first states.

    Args:
        step: computes a step; it must give the same each time.
        states: states before the first step.
        parameters: leaves that the steps use.
        plan: the plan, for as many steps as there are.
    """
    leaves = [each for each in parameters if each.requires_grad]
    run = _Run(step, leaves, plan, Counted(loss=states[0].new_zeros(())))
    gradients = run.all_of(states)
    for state, gradient in zip(states, gradients, strict=True):
        if state.requires_grad:
            state.grad = gradient if state.grad is None else state.grad + gradient
    return run.counted


@dataclass(frozen=True)
class _Segment:
    """Steps whose gradients are still to be computed."""

    start: int
    stop: int
    states: States
    """States before the first of them."""
    num_states: int
    """Number of states that may be stored for them."""


@dataclass(frozen=True)
class _Taped:
    """A step whose backward pass can follow."""

    before: States
    after: States
    loss: Tensor


class _Run:
    """A pass by a plan. What is left to do is a stack: of a segment the last steps come first."""

    def __init__(self, step: Step, leaves: Sequence[Tensor], plan: Plan, counted: Counted) -> None:
        self._step, self._leaves, self._plan, self.counted = step, leaves, plan, counted
        self._later: list[Tensor] = []
        """Gradients of the states after the steps that are left."""

    def all_of(self, states: States) -> list[Tensor]:
        """Return the gradients of the first states."""
        self._later = [torch.zeros_like(each) for each in states]
        left: list[_Segment | _Taped | None] = [_Segment(0, self._plan.num_steps, states, self._plan.num_states)]
        while left:
            match left.pop():
                case _Segment() as segment:
                    left += self._divide(segment)
                case _Taped() as taped:
                    self._back(taped)
                case None:
                    self.counted.store(-1)
        return self._later

    def _divide(self, segment: _Segment) -> list[_Segment | _Taped | None]:
        """Store a state of a segment, and return what is left of it, the first to be done at the end."""
        start, stop, states, num_states = segment.start, segment.stop, segment.states, segment.num_states
        steps, is_hidden = stop - start, self._plan.kind == "hidden"
        if steps == 0:
            return []
        if num_states == 1 or (steps == 1 and is_hidden):
            for number in reversed(range(start, stop)):
                self._back(self._taped(number, self._forward(start, number, states)))
            return []
        middle = start + self._plan.first_stored(steps, num_states)
        if is_hidden:
            after = self._forward(start, middle, states)
            self.counted.store(+1)
            before: list[_Segment | _Taped | None] = [_Segment(start, middle, states, num_states), None]
        else:
            taped = self._taped(middle - 1, self._forward(start, middle - 1, states))
            after = tuple(each.detach() for each in taped.after)
            before = [_Segment(start, middle - 1, states, num_states), taped]
        return [*before, _Segment(middle, stop, after, num_states - 1)]

    def _forward(self, start: int, stop: int, states: States) -> States:
        with torch.no_grad():
            for number in range(start, stop):
                states, _ = self._step(number, states)
                self.counted.forward_steps += 1
        return states

    def _taped(self, number: int, states: States) -> _Taped:
        """Do a step so that its backward pass can follow: what that needs takes the place of a stored state."""
        before = tuple(each.detach().requires_grad_() for each in states)
        with torch.enable_grad():
            after, loss = self._step(number, before)
        self.counted.forward_steps += 1
        self.counted.store(+1)
        return _Taped(before, after, loss)

    def _back(self, taped: _Taped) -> None:
        self.counted.loss = self.counted.loss + taped.loss.detach()
        wanted, of_outputs = [*taped.before, *self._leaves], [torch.ones_like(taped.loss), *self._later]
        found = torch.autograd.grad(
            [taped.loss, *taped.after], wanted, of_outputs, allow_unused=True, materialize_grads=True
        )
        for leaf, gradient in zip(self._leaves, found[len(taped.before) :], strict=True):
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._later = list(found[: len(taped.before)])
        self.counted.store(-1)
