"""Hessian-free optimisation, against the closed form, and its conjugate gradients against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import cg

from orchestray.trainers.solvers.hessian_free import HessianFree
from orchestray.trainers.solvers.linear_cg import conjugate_gradients
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


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_a_quadratic_is_solved_in_one_outer_step(curvature: str) -> None:
    matrix, right = random_matrix(10, 100.0), random_vector(10)
    solver = HessianFree(curvature=curvature, damping=0.0, iterations=30, tolerance=0.0)
    path, made = steps_of(solver, FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), 1)
    assert float((path[1] - torch.linalg.solve(matrix, right)).norm()) < 1e-8
    assert made[0].metrics["step_length"] == 1.0


def test_conjugate_gradients_are_scipy_s() -> None:
    matrix, right = random_matrix(15, 1000.0), random_vector(15)
    ours, count = conjugate_gradients(lambda v: matrix @ v, right, torch.zeros_like(right), most=8, tolerance=0.0)
    theirs, _ = cg(matrix.numpy(), right.numpy(), rtol=1e-300, maxiter=8)
    assert count == 8
    torch.testing.assert_close(ours, torch.from_numpy(np.asarray(theirs)), rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_end_early_without_progress_and_at_negative_curvature() -> None:
    matrix, right = random_matrix(200, 1e6), random_vector(200)
    loose, early = conjugate_gradients(lambda v: matrix @ v, right, torch.zeros_like(right), most=200, tolerance=0.1)
    _, late = conjugate_gradients(lambda v: matrix @ v, right, torch.zeros_like(right), most=200, tolerance=1e-4)
    assert early < late
    assert float(right @ loose) > 0
    direction, count = conjugate_gradients(lambda v: -v, right, torch.zeros_like(right), most=200, tolerance=0.0)
    assert count == 0
    assert torch.equal(direction, right)


def test_the_damping_follows_how_well_the_model_foretells_the_function() -> None:
    # A quadratic is foretold exactly, so the damping only falls.
    matrix, right = random_matrix(5, 10.0), random_vector(5)
    _, made = steps_of(HessianFree(), FormulaOracle(quadratic(matrix, right)), torch.zeros_like(right), 5)
    assert [taken.metrics["damping"] for taken in made] == pytest.approx([(2 / 3) ** k for k in range(5)])
    # A cosine bends less and less away from its top, so that the step goes too far and is foretold too well.
    _, made = steps_of(
        HessianFree(damping=1e-3), FormulaOracle(lambda x: (x.square() + 1.0).sqrt().sum()), vector(3.0), 2
    )
    assert made[1].metrics["damping"] > made[0].metrics["damping"]


def test_logistic_regression_and_rosenbrock_s_function_end_at_their_minima() -> None:
    oracle = logistic(1, 10, decay=1e-3)
    path, _ = steps_of(HessianFree(), oracle, torch.zeros(10, dtype=torch.float64), 60)
    assert float(oracle.gradient(path[-1])[1].norm()) < 1e-8
    path, _ = steps_of(HessianFree(curvature="hessian"), FormulaOracle(rosenbrock), vector(-1.2, 1.0), 150)
    assert float((path[-1] - 1.0).norm()) < 1e-6
