"""Backpropagation through time with few stored states: the work of the dynamic programme, and the same gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from heapq import heappop, heappush
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.survey.lab.remembering import lstm_step
from orchestray.trainers.survey.operators.cells import CellWeights
from orchestray.trainers.survey.operators.recurrent_memory import Counted, Kind, Plan, backpropagate

KINDS: tuple[Kind, ...] = get_args(Kind)


def pass_of(steps: int, num_states: int, kind: Kind, hidden: int = 3) -> tuple[Counted, list[Tensor], list[Tensor]]:
    """Return what a pass counts, its gradients, and those that torch's own BPTT gives; the first state's are last."""
    torch.manual_seed(0)
    network, x = nn.LSTM(2, hidden).double(), torch.randn(steps, 2, 2, dtype=torch.float64)
    first = tuple(torch.randn(2, hidden, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs, _ = network(x, tuple(each[None] for each in first))
    loss = outputs.square().sum()
    exact = list(torch.autograd.grad(loss, [*network.parameters(), *first]))
    step = partial(lstm_step, CellWeights.of_layer(network), x)
    counted = backpropagate(step, first, network.parameters(), Plan(steps, num_states, kind))
    torch.testing.assert_close(counted.loss, loss.detach())
    found = [each.grad for each in (*network.parameters(), *first)]
    return counted, [each for each in found if each is not None], exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "num_states"), [(1, 1), (7, 1), (7, 2), (23, 3), (23, 23), (40, 5), (40, 90)])
def test_the_gradient_is_that_of_plain_bptt_for_the_work_and_the_memory_of_the_plan(
    steps: int, num_states: int, kind: Kind
) -> None:
    counted, found, exact = pass_of(steps, num_states, kind)
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert counted.forward_steps == Plan(steps, num_states, kind).forward_steps(steps, num_states)
    assert counted.most_stored <= num_states


def test_a_thousand_steps_with_50_stored_states_take_a_third_more_time_by_count() -> None:
    """5 % of the states; a backward step has the products of two forward steps."""
    counted, found, exact = pass_of(1000, 50, "internal", hidden=1)
    assert counted.most_stored == 50
    assert counted.forward_steps == Plan(1000, 50, "internal").forward_steps(1000, 50)
    more = (counted.forward_steps - 1000) / 3000
    assert 0.28 <= more <= 1 / 3
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


@cache
def least(steps: int, num_states: int, kind: Kind) -> int:
    """Return the least work by trying each first state, written as the paper has it."""
    if num_states == 1 or steps <= 1:
        return steps * (steps + 1) // 2
    return min(_tried(steps, num_states, kind))


def _tried(steps: int, num_states: int, kind: Kind) -> Iterator[int]:
    for y in range(1, steps if kind == "hidden" else steps + 1):
        before = y if kind == "hidden" else y - 1
        yield y + least(steps - y, num_states - 1, kind) + least(before, num_states, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_s_work_is_the_least_of_the_recurrence(kind: Kind) -> None:
    plan = Plan(30, 6, kind)
    for steps in range(1, 31):
        for num_states in range(1, 7):
            assert plan.forward_steps(steps, num_states) == least(steps, num_states, kind)


def searched(steps: int, num_states: int, kind: Kind) -> int:
    """Return the fewest forward steps of any order of work, by a search over all states of the memory.

    Where the forward pass stands, what is stored, and the steps whose backward pass is left: a forward step costs one.
    Of hidden states, the last place is for what the backward pass of a step needs, which is computed for it.
    """
    room = num_states - 1 if kind == "hidden" else num_states
    waiting: list[tuple[int, int, int, frozenset[int]]] = [(0, steps, 0, frozenset())]
    done: set[tuple[int, int, frozenset[int]]] = set()
    while waiting:
        cost, left, place, stored = heappop(waiting)
        if not left:
            return cost
        if (left, place, stored) in done:
            continue
        done.add((left, place, stored))
        found = [(cost, left, other, stored) for other in (0, *stored)]  # go on from there
        found += [(cost, left, place, stored - {other}) for other in stored]
        if place < left:
            found.append((cost + 1, left, place + 1, stored))
            if kind == "internal" and len(stored) < room:
                found.append((cost + 1, left, place + 1, stored | {place + 1}))
        if kind == "hidden" and len(stored) < room:
            found.append((cost, left, place, stored | {place}))
        if kind == "hidden" and place == left - 1:
            found.append((cost + 1, left - 1, 0, stored - {left}))
        if kind == "internal" and left in stored:
            found.append((cost, left - 1, 0, stored - {left}))
        for each in found:
            heappush(waiting, each)
    raise AssertionError("there is always a way")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_states", [1, 2, 3, 4])
def test_no_order_of_work_in_the_same_memory_takes_fewer_forward_steps_than_the_plan(
    num_states: int, kind: Kind
) -> None:
    for steps in range(1, 9):
        assert Plan(steps, num_states, kind).forward_steps(steps, num_states) == searched(steps, num_states, kind)


def test_with_a_state_for_each_step_nothing_is_computed_again_and_hidden_ones_cost_a_second_pass() -> None:
    assert Plan(50, 50, "internal").forward_steps(50, 50) == 50
    assert Plan(50, 50, "hidden").forward_steps(50, 50) == 2 * 50 - 1
    assert Plan(50, 1).forward_steps(50, 1) == math.comb(51, 2)


@pytest.mark.parametrize(("steps", "num_states"), [(0, 1), (5, 0)])
def test_a_plan_without_steps_or_states_is_refused(steps: int, num_states: int) -> None:
    with pytest.raises(ValueError, match="a plan needs a step and a state at least"):
        Plan(steps, num_states)


def test_gradients_are_added_to_those_that_are_there() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(number: int, states: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        state = weight * states[0]
        return (state,), state

    for _ in range(2):
        backpropagate(step, (torch.ones((), dtype=torch.float64),), [weight], Plan(3, 2))
    assert weight.grad is not None
    assert float(weight.grad) == 2 * (1 + 2 + 3)
