"""L-BFGS, against torch's, and its recursion against the matrices of BFGS."""

from __future__ import annotations

import torch

from orchestray.trainers.solvers.lbfgs import Lbfgs, Pairs
from support.oracles import FormulaOracle, logistic, random_matrix, random_vector, rosenbrock, steps_of


def test_the_minimum_is_that_of_torch_s_lbfgs() -> None:
    oracle = logistic(1, 12, decay=1e-3)
    path, _ = steps_of(Lbfgs(history=5), oracle, torch.zeros(12, dtype=torch.float64), 60)
    x = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.LBFGS(
        [x], max_iter=200, tolerance_grad=1e-12, tolerance_change=0.0, history_size=5, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        value, x.grad = oracle.gradient(x.detach())
        return value

    theirs.step(closure)
    ours, left = (float(oracle.gradient(found)[1].norm()) for found in (path[-1], x.detach()))
    assert ours < 1e-10
    assert left < 1e-8
    # Both are the minimum, as far as their gradients say: the function bends by its penalty at least.
    assert float((path[-1] - x.detach()).norm()) <= (ours + left) / 1e-3


def test_a_long_rosenbrock_s_valley_ends_at_its_minimum() -> None:
    path, _ = steps_of(Lbfgs(), FormulaOracle(rosenbrock), torch.full((20,), -0.5, dtype=torch.float64), 150)
    assert float((path[-1] - 1.0).abs().max()) < 1e-8


def test_the_memory_is_the_last_pairs_of_the_history_beside_one_gradient_whatever_the_steps() -> None:
    solver, size = Lbfgs(history=4), 50
    for steps in (2, 10):
        path, _ = steps_of(solver, FormulaOracle(rosenbrock), torch.full((size,), 0.5, dtype=torch.float64), steps)
        held = {name: tensor.shape for name, tensor in solver.state.items() if tensor.dim()}
        assert held == {"steps": (4, size), "changes": (4, size), "gradient": (size,)}
    gradients = [FormulaOracle(rosenbrock).gradient(x)[1] for x in path]
    assert int(solver.state["pairs"]) == 10
    for number in range(6, 10):
        torch.testing.assert_close(solver.state["steps"][number % 4], path[number + 1] - path[number])
        torch.testing.assert_close(solver.state["changes"][number % 4], gradients[number + 1] - gradients[number])


def test_the_recursion_is_the_product_with_bfgs_s_matrix_of_the_last_pairs() -> None:
    size, history = 7, 3
    matrix = random_matrix(size, 20.0)
    state = Pairs.fresh(torch.zeros(size, dtype=torch.float64), history)
    steps = [random_vector(size, seed) for seed in range(5)]
    for step in steps:
        for target, value in Pairs.of(state).add(step, matrix @ step):
            target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)
    last = steps[-1]
    inverse = float(last @ matrix @ last) / float((matrix @ last).square().sum()) * torch.eye(size, dtype=torch.float64)
    for step in steps[-history:]:
        change = matrix @ step
        keep = torch.eye(size, dtype=torch.float64) - torch.outer(step, change) / float(step @ change)
        inverse = keep @ inverse @ keep.T + torch.outer(step, step) / float(step @ change)
    probe = random_vector(size, 9)
    torch.testing.assert_close(Pairs.of(state).times(probe), inverse @ probe, rtol=1e-10, atol=1e-12)


def test_a_pair_without_curvature_is_not_learned_from() -> None:
    state = Pairs.fresh(torch.zeros(3, dtype=torch.float64), 2)
    step = random_vector(3)
    assert Pairs.of(state).add(step, -step) == []
