"""BFGS, against scipy and the secant equation."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der

from orchestray.trainers.solvers.bfgs import Bfgs
from support.oracles import FormulaOracle, rosenbrock, steps_of, vector


@pytest.mark.parametrize("start", [vector(-1.2, 1.0), vector(2.0, -1.0, 0.5, 3.0)])
def test_rosenbrock_s_function_is_minimised_to_1e_8_where_scipy_minimises_it(start: torch.Tensor) -> None:
    path, _ = steps_of(Bfgs(), FormulaOracle(rosenbrock), start, 60)
    found = minimize(rosen, start.numpy(), jac=rosen_der, method="BFGS", options={"gtol": 1e-10})
    assert float((path[-1] - 1.0).abs().max()) < 1e-8
    assert float((path[-1] - torch.from_numpy(found.x)).abs().max()) < 1e-6


def test_the_matrix_takes_each_change_of_the_gradient_to_its_step_and_stays_positive_definite() -> None:
    oracle, solver, x = FormulaOracle(rosenbrock), Bfgs(), vector(-1.2, 1.0, 0.3)
    solver.begin(x)
    for _ in range(15):
        taken = solver.find(x, oracle, 1.0)
        change = oracle.gradient(taken.x)[1] - oracle.gradient(x)[1]
        solver.make(taken)
        inverse = solver.state["inverse"]
        torch.testing.assert_close(inverse @ change, taken.x - x, rtol=1e-8, atol=1e-12)
        assert float(torch.linalg.eigvalsh((inverse + inverse.T) / 2).min()) > 0
        x = taken.x


def test_a_step_that_fails_midway_leaves_the_solver_as_it_was() -> None:
    class Failing(FormulaOracle):
        fails_at = 1 << 30

        def gradient(self, x: torch.Tensor) -> tuple[float, torch.Tensor]:
            if self.num_calls >= self.fails_at:
                raise OSError
            return super().gradient(x)

    oracle, solver = Failing(rosenbrock), Bfgs()
    path, _ = steps_of(solver, oracle, vector(-1.2, 1.0), 5)
    before = {name: value.clone() for name, value in solver.state.items()}
    oracle.fails_at = oracle.num_calls
    with pytest.raises(OSError):
        solver.find(path[-1], oracle, 1.0)
    assert all(torch.equal(before[name], value) for name, value in solver.state.items())
