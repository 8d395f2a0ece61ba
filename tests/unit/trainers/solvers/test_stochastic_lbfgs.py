"""Stochastic L-BFGS: a linear rate on strongly convex problems, also where their scales differ."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from orchestray.trainers.solvers.lbfgs import Lbfgs
from orchestray.trainers.solvers.stochastic_lbfgs import StochasticLbfgs
from orchestray.trainers.solvers.svrg import Svrg
from support.oracles import FormulaOracle, logistic, steps_of

BATCHES, SIZE, STEPS = 15, 8, 600


def test_the_logarithm_of_the_error_is_linear_in_the_iterations_and_that_of_sgd_is_not() -> None:
    oracle = logistic(BATCHES, SIZE, decay=1e-2, spread=30.0)
    whole = FormulaOracle(lambda x: torch.stack([formula(x) for formula in oracle._formulas]).mean())
    start = torch.zeros(SIZE, dtype=torch.float64)
    best = steps_of(Lbfgs(), whole, start, 40)[0][-1]
    order = torch.randint(BATCHES, (STEPS,), generator=torch.Generator().manual_seed(5)).tolist()
    solver = StochasticLbfgs()
    path, _ = steps_of(solver, oracle, start, STEPS, lr=0.05, order=order)
    logs = [math.log10(float((x - best).norm())) for x in path[STEPS // 10 :: STEPS // 10]]  # with curvature from there
    assert logs[-1] < -10
    # A straight line explains nearly all of the logarithm.
    at, values = torch.arange(len(logs)).double(), torch.tensor(logs).double()
    assert float(torch.corrcoef(torch.stack([at, values]))[0, 1]) < -0.995
    # SGD's logarithm stays where its noise is, at a rate at which that of steps without noise falls on.
    by_sgd, without_noise = [start], [start]
    for batch in order:
        oracle.see(batch)
        by_sgd.append(by_sgd[-1] - oracle.gradient(by_sgd[-1])[1])
        without_noise.append(without_noise[-1] - oracle.whole_gradient(without_noise[-1]))
    noisy, falling = (
        [math.log10(float((x - best).norm())) for x in path[STEPS // 6 :: STEPS // 6]]
        for path in (by_sgd, without_noise)
    )
    assert min(before - after for before, after in pairwise(falling)) > 0.4
    assert max(noisy) - min(noisy) < 0.5
    assert min(noisy) > -1
    # Without the curvature, the same gradients and rate are left far behind.
    plain = steps_of(Svrg(), oracle, start, STEPS, lr=0.05, order=order)[0][-1]
    assert float((plain - best).norm()) > 0.01
    assert int(solver.state["pairs"]) >= STEPS // 10 - 2


def test_a_pair_is_the_move_of_the_mean_weights_and_its_product_with_the_batch_s_hessian() -> None:
    oracle = logistic(3, SIZE, decay=0.1)
    solver = StochasticLbfgs(pair_every_steps=4)
    path, _ = steps_of(solver, oracle, torch.zeros(SIZE, dtype=torch.float64), 8, lr=0.1)
    first, second = torch.stack(path[1:5]).mean(0), torch.stack(path[5:9]).mean(0)
    oracle.see(7)
    torch.testing.assert_close(solver.state["steps"][0], second - first)
    torch.testing.assert_close(solver.state["changes"][0], oracle.hessian(second)(second - first))
    assert int(solver.state["pairs"]) == 1
