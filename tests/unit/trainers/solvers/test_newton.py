"""Newton's method: the error is squared in each step near a minimum, and steps go down elsewhere."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from orchestray.trainers.solvers.newton import Newton
from support.oracles import (
    FormulaOracle,
    logistic,
    quadratic,
    random_matrix,
    random_vector,
    rosenbrock,
    steps_of,
    vector,
)


def test_second_order_convergence_doubles_the_exponent_of_the_error_in_each_step() -> None:
    oracle = logistic(1, 8, decay=1e-3)
    path, _ = steps_of(Newton(), oracle, torch.zeros(8, dtype=torch.float64), 14)
    errors = [float((x - path[-1]).norm()) for x in path]
    near = [e for e in errors if 1e-13 < e < 0.3]
    assert len(near) >= 3
    orders = [math.log(after) / math.log(before) for before, after in pairwise(near)]
    assert all(order > 1.7 for order in orders)
    # A damped Hessian is not Newton's: its error is multiplied by the same factor in each step.
    damped, _ = steps_of(Newton(damping=0.1), oracle, torch.zeros(8, dtype=torch.float64), 30)
    left = [float((x - path[-1]).norm()) for x in damped[-5:]]
    factors = [after / before for before, after in pairwise(left)]
    assert max(factors) - min(factors) < 0.05 < min(factors)


def test_a_quadratic_is_solved_in_one_step() -> None:
    matrix, right = random_matrix(6, 100.0), random_vector(6)
    path, _ = steps_of(Newton(), FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), 1)
    torch.testing.assert_close(path[1], torch.linalg.solve(matrix, right), rtol=1e-10, atol=1e-10)


def test_where_the_hessian_is_not_positive_definite_steps_go_down_and_reach_the_minimum() -> None:
    def hill(x: torch.Tensor) -> torch.Tensor:
        return (x.square() - 1.0).square().sum() + 0.1 * x.sum()

    path, made = steps_of(Newton(), FormulaOracle(hill), vector(0.05, -0.02), 40)
    values = [taken.value for taken in made]
    assert made[0].metrics["damping"] > 0
    assert all(after <= before + 1e-13 for before, after in pairwise(values))
    assert float(FormulaOracle(hill).gradient(path[-1])[1].norm()) < 1e-10
    path, _ = steps_of(Newton(), FormulaOracle(rosenbrock), vector(-1.2, 1.0), 40)
    assert float((path[-1] - 1.0).norm()) < 1e-8
