"""SVRG: the noise of its gradients goes away, and with it what stops plain SGD."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from orchestray.trainers.solvers.lbfgs import Lbfgs
from orchestray.trainers.solvers.svrg import Svrg
from support.oracles import FormulaOracle, logistic, random_vector, steps_of

BATCHES, SIZE = 15, 6


def minimum(oracle: FormulaOracle) -> torch.Tensor:
    """Return the minimum over all batches."""
    whole = FormulaOracle(lambda x: torch.stack([formula(x) for formula in oracle._formulas]).mean())
    return steps_of(Lbfgs(), whole, torch.zeros(SIZE, dtype=torch.float64), 40)[0][-1]


def order(steps: int) -> list[int]:
    return torch.randint(BATCHES, (steps,), generator=torch.Generator().manual_seed(4)).tolist()


def test_the_mean_over_the_batches_is_the_whole_gradient_and_the_variance_goes_to_0_at_the_minimum() -> None:
    oracle = logistic(BATCHES, SIZE, decay=1e-2)
    best, away = minimum(oracle), random_vector(SIZE)
    variances = []
    for distance in (1.0, 1e-2, 1e-4):
        x, solver = best + distance * away, Svrg()
        solver.begin(x)
        solver.state["steps_made"] += 1  # not the step of an anchor
        solver.state["anchor"].copy_(best + 0.5 * distance * away)
        solver.state["whole_gradient"].copy_(oracle.whole_gradient(solver.state["anchor"]))
        drawn = []
        for batch in range(BATCHES):
            oracle.see(batch)
            drawn.append(solver.reduced(x, oracle)[1])
        mean = torch.stack(drawn).mean(0)
        torch.testing.assert_close(mean, oracle.whole_gradient(x), rtol=1e-9, atol=1e-12)
        variances.append(float((torch.stack(drawn) - mean).square().sum(1).mean()))
    plain = torch.stack([(oracle.see(batch), oracle.gradient(best)[1])[1] for batch in range(BATCHES)])
    assert float(plain.square().sum(1).mean()) > 1e-3
    # Proportional to the square of the distance.
    assert variances[1] / variances[0] < 1e-3
    assert variances[2] / variances[1] < 1.1e-4


def test_a_constant_rate_converges_linearly_where_sgd_stops_at_its_noise() -> None:
    oracle = logistic(BATCHES, SIZE, decay=1e-2)
    best, start, steps = minimum(oracle), torch.zeros(SIZE, dtype=torch.float64), 900
    path, made = steps_of(Svrg(), oracle, start, steps, lr=0.5, order=order(steps))
    assert [step.metrics["anchor_age"] for step in made[: BATCHES + 2]] == [*range(BATCHES), 0, 1]
    logs = [math.log10(float((x - best).norm())) for x in path[:: steps // 6]]
    falls = [before - after for before, after in pairwise(logs)]
    assert logs[-1] < -11
    assert min(falls) > 0.9 * max(falls[1:])
    x = start
    for batch in order(steps):
        oracle.see(batch)
        x = x - 0.5 * oracle.gradient(x)[1]
    assert float((x - best).norm()) > 1e-3


def test_an_anchor_is_taken_every_so_many_steps_and_every_epoch_by_default() -> None:
    class Counting(FormulaOracle):
        at: list[int]

        def whole_gradient(self, x: torch.Tensor) -> torch.Tensor:
            self.at.append(self.num_calls // 2)
            return super().whole_gradient(x)

    def taken_at(solver: Svrg) -> list[int]:
        oracle = Counting(*logistic(4, SIZE, decay=0.1)._formulas)
        oracle.at = []
        steps_of(solver, oracle, torch.zeros(SIZE, dtype=torch.float64), 9, lr=0.1)
        return oracle.at

    assert taken_at(Svrg()) == [0, 4, 8]
    assert taken_at(Svrg(anchor_every_steps=3)) == [0, 3, 6]
