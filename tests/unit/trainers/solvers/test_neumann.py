"""The Neumann series, against the inverse that it tends to."""

from __future__ import annotations

from itertools import pairwise

import torch

from orchestray.trainers.solvers.neumann import Neumann, inverse_times, largest_eigenvalue
from support.oracles import FormulaOracle, logistic, quadratic, random_matrix, random_vector, steps_of


def test_the_truncated_series_tends_to_the_product_with_the_inverse_at_the_rate_of_its_smallest_eigenvalue() -> None:
    matrix, right = random_matrix(8, 10.0), random_vector(8)
    exact = torch.linalg.solve(matrix, right)
    errors = []
    for terms in (1, 50, 100, 150, 400):
        found = inverse_times(lambda v: matrix @ v, right, 0.9, terms)
        # (I - (I - eta B)^terms) B^-1 v, by the sum of the series.
        rest = torch.linalg.matrix_power(torch.eye(8, dtype=torch.float64) - 0.9 * matrix, terms)
        torch.testing.assert_close(found, exact - rest @ exact, rtol=1e-9, atol=1e-11)
        errors.append(float((found - exact).norm()))
    assert errors[-1] < 1e-10
    assert all(after < before for before, after in pairwise(errors))


def test_a_step_on_a_quadratic_is_newton_s_if_the_series_is_long() -> None:
    matrix, right = random_matrix(6, 20.0), random_vector(6)
    solver = Neumann(terms=1500, damping=0.0, power_iterations=30)
    path, _ = steps_of(solver, FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), 1)
    torch.testing.assert_close(path[1], torch.linalg.solve(matrix, right), rtol=1e-9, atol=1e-9)


def test_more_terms_need_fewer_steps() -> None:
    oracle = logistic(1, 10, decay=1e-2, spread=10.0)

    def steps_to_the_minimum(terms: int) -> int:
        _path, made = steps_of(Neumann(terms=terms, damping=0.0), oracle, torch.zeros(10, dtype=torch.float64), 20)
        return next(step for step, taken in enumerate(made) if taken.metrics["grad_norm"] < 1e-6)

    assert steps_to_the_minimum(30) < 0.5 * steps_to_the_minimum(3)


def test_the_largest_eigenvalue_is_found_from_below() -> None:
    matrix = random_matrix(20, 100.0)
    found = [largest_eigenvalue(lambda v: matrix @ v, random_vector(20), count) for count in (2, 5, 60)]
    assert found[0] <= found[1] <= found[2] <= 1.0 + 1e-12
    assert found[2] > 0.99
