"""Conjugate gradients, against linear ones and Rosenbrock's minimum."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der

from orchestray.trainers.solvers.conjugate_gradient import ConjugateGradient
from support.oracles import FormulaOracle, quadratic, random_matrix, random_vector, rosenbrock, steps_of, vector


@pytest.mark.parametrize("size", [2, 5, 12])
def test_a_quadratic_of_n_dimensions_is_solved_in_n_steps_by_the_iterates_of_linear_conjugate_gradients(
    size: int,
) -> None:
    matrix, right = random_matrix(size, 20.0), random_vector(size)
    path, _ = steps_of(ConjugateGradient(), FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), size)
    x = torch.zeros_like(right)
    rest = direction = right - matrix @ x
    for step in range(size):
        length = float(rest @ rest) / float(direction @ matrix @ direction)
        x = x + length * direction
        after = rest - length * (matrix @ direction)
        direction, rest = after + float(after @ after) / float(rest @ rest) * direction, after
        torch.testing.assert_close(path[step + 1], x, rtol=1e-7, atol=1e-9)
    assert float((path[-1] - torch.linalg.solve(matrix, right)).norm()) < 1e-8
    assert float((path[-2] - torch.linalg.solve(matrix, right)).norm()) > 1e-6


def test_directions_are_conjugate() -> None:
    matrix, right = random_matrix(6, 50.0), random_vector(6)
    path, _ = steps_of(ConjugateGradient(), FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), 6)
    steps = torch.stack([after - before for before, after in pairwise(path)])
    products = steps @ matrix @ steps.T
    scale = products.diagonal().sqrt()
    cosines = products / scale[:, None] / scale
    assert float((cosines - torch.eye(6, dtype=torch.float64)).abs().max()) < 1e-6


def test_rosenbrock_s_function_ends_at_the_minimum_that_scipy_finds() -> None:
    start = vector(-1.2, 1.0, -0.5, 0.8)
    path, made = steps_of(ConjugateGradient(), FormulaOracle(rosenbrock), start, 60)
    found = minimize(rosen, start.numpy(), jac=rosen_der, method="CG", options={"gtol": 1e-10})
    assert float((path[-1] - 1.0).norm()) < 1e-8
    assert float((path[-1] - torch.from_numpy(found.x)).norm()) < 1e-6
    values = [taken.value for taken in made]
    assert all(after <= before for before, after in pairwise(values))
