"""Line searches, against the conditions that they are to reach."""

from __future__ import annotations

import math

import pytest
import torch

from orchestray.trainers.solvers.line_search import Line
from support.oracles import Formula, FormulaOracle, rosenbrock, vector


def sharp(x: torch.Tensor) -> torch.Tensor:
    return (x.square() + 1e-4).sqrt().sum()


def overflowing(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() - 2.0 * x).sum()


CASES: list[tuple[Formula, torch.Tensor]] = [
    (rosenbrock, vector(-1.2, 1.0)),
    (rosenbrock, vector(0.3, -2.0, 1.5)),
    (sharp, vector(3.0)),
    (overflowing, vector(4.0, -2.0)),
]


@pytest.mark.parametrize(("formula", "x"), CASES)
@pytest.mark.parametrize("first", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("curvature", [0.1, 0.9])
def test_a_point_satisfies_the_strong_wolfe_conditions_whatever_is_tried_first(
    formula: Formula, x: torch.Tensor, first: float, curvature: float
) -> None:
    oracle = FormulaOracle(formula)
    value, gradient = oracle.gradient(x)
    line = Line(oracle, x, value, gradient, -gradient)
    found = line.strong_wolfe(first, curvature)
    assert found is not None
    slope = -float(gradient @ gradient)
    assert found.value <= value + 1e-4 * found.length * slope
    assert abs(found.slope) <= -curvature * slope
    assert found.x.tolist() == (x - found.length * gradient).tolist()
    assert oracle.num_calls == line.num_points + 1


def test_halving_ends_at_the_first_length_that_lowers_the_function_enough() -> None:
    oracle, x = FormulaOracle(rosenbrock), vector(-1.2, 1.0)
    value, gradient = oracle.gradient(x)
    found = Line(oracle, x, value, gradient, -gradient).backtrack(1.0)
    assert found is not None
    length, end, after = found
    enough = [
        0.5**k
        for k in range(25)
        if oracle.value(x - 0.5**k * gradient) <= value - 1e-4 * 0.5**k * float(gradient @ gradient)
    ]
    assert length == enough[0]
    assert after == oracle.value(end)


def test_no_point_is_found_uphill() -> None:
    oracle, x = FormulaOracle(rosenbrock), vector(-1.2, 1.0)
    value, gradient = oracle.gradient(x)
    assert Line(oracle, x, value, gradient, gradient).backtrack(1.0) is None


def test_a_search_through_values_that_are_not_finite_ends_at_a_finite_one() -> None:
    oracle, x = FormulaOracle(lambda x: -torch.log(1.0 - x.square()).sum() + 0.5 * x.sum()), vector(0.9)
    value, gradient = oracle.gradient(x)
    found = Line(oracle, x, value, gradient, -gradient).strong_wolfe(10.0, 0.5)
    assert found is not None
    assert math.isfinite(found.value)
    assert found.value < value
