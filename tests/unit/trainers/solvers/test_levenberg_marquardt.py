"""Levenberg-Marquardt, against a known curve and scipy's least squares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import least_squares as scipy_least_squares

from orchestray.trainers.solvers.levenberg_marquardt import LevenbergMarquardt
from support.oracles import least_squares, steps_of, vector

TIMES = torch.linspace(0.0, 4.0, 25, dtype=torch.float64)
TRUE = vector(2.5, 1.3, 0.4)


def curve(x: torch.Tensor) -> torch.Tensor:
    return x[0] * torch.exp(-x[1] * TIMES) + x[2]


def test_a_known_curve_is_fitted_to_1e_8() -> None:
    path, made = steps_of(
        LevenbergMarquardt(), least_squares(lambda x: curve(x) - curve(TRUE)), vector(1.0, 0.1, 0.0), 25
    )
    assert float((path[-1] - TRUE).abs().max()) < 1e-8
    values = [taken.value for taken in made]
    assert all(after <= before for before, after in pairwise(values))


def test_a_noisy_curve_is_fitted_where_scipy_fits_it() -> None:
    noise = 0.1 * torch.randn(25, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = curve(TRUE) + noise
    start = vector(1.0, 0.1, 0.0)
    path, _ = steps_of(LevenbergMarquardt(), least_squares(lambda x: curve(x) - data), start, 40)

    def residuals(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = (curve(torch.from_numpy(x)) - data).numpy()
        return found

    found = scipy_least_squares(residuals, start.numpy(), method="lm", xtol=1e-14, ftol=1e-14, gtol=1e-14)
    assert float((path[-1] - torch.from_numpy(found.x)).abs().max()) < 1e-7


def test_far_from_the_curve_a_step_without_damping_climbs_and_a_damped_one_is_tried_again_until_it_falls() -> None:
    oracle, start = least_squares(lambda x: torch.atan(20.0 * x)), vector(1.0)
    gradient = oracle.gradient(start)[1]
    plain = start - gradient / oracle.gauss_newton(start)(torch.ones_like(start))
    assert oracle.value(plain) > oracle.value(start)
    path, made = steps_of(LevenbergMarquardt(damping=1e-6), oracle, start, 30)
    assert made[0].metrics["evaluations"] > 1
    assert abs(float(path[-1])) < 1e-8


def test_a_step_solves_the_damped_gauss_newton_system() -> None:
    x, data = vector(1.0, 0.1, 0.0), curve(TRUE) + torch.cos(9.0 * TIMES)  # residuals that stay, so no Hessian
    path, made = steps_of(LevenbergMarquardt(damping=0.5), least_squares(lambda x: curve(x) - data), x, 1)
    jacobian = torch.autograd.functional.jacobian(curve, x)
    matrix = 2 / len(TIMES) * jacobian.T @ jacobian
    gradient = 2 / len(TIMES) * jacobian.T @ (curve(x) - data)
    step = torch.linalg.solve(matrix + 0.5 * torch.diag(matrix.diagonal()), -gradient)
    assert made[0].metrics["evaluations"] == 1.0
    torch.testing.assert_close(path[1] - x, step, rtol=1e-10, atol=1e-12)
