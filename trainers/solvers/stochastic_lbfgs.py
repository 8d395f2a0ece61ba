"""Stochastic L-BFGS, with gradients of reduced variance."""

from __future__ import annotations

from torch import Tensor

from orchestray.trainers.solvers.base import Oracle, Taken, number
from orchestray.trainers.solvers.lbfgs import Pairs
from orchestray.trainers.solvers.svrg import Svrg


class StochasticLbfgs(Svrg):
    """Stochastic L-BFGS (P. Moritz, R. Nishihara, M. Jordan, AISTATS 2016, algorithm 1).

    Gradients are those of SVRG. Every `pair_every_steps` steps the mean of as many weights gives a pair: its move since
    the last mean, and the product of the batch's Hessian with this move (Byrd et al. 2016). So neither the noise of
    gradients nor that of single weights gets into the curvature, and convergence is linear on strongly convex losses.
    """

    def __init__(self, history: int = 10, pair_every_steps: int = 10, anchor_every_steps: int | None = None) -> None:
        """
        Args:
            history: number of pairs.
            pair_every_steps: number of steps between two pairs.
            anchor_every_steps: number of steps between two anchors; None: an epoch.
        """
        super().__init__(anchor_every_steps)
        self._history, self._pair_every = history, pair_every_steps

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        means = {"sum": x.new_zeros(x.numel()), "last_mean": x.new_zeros(x.numel()), "means": number(x)}
        return {**super().fresh(x), **means, **Pairs.fresh(x, self._history)}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        state, pairs = self.state, Pairs.of(self.state)
        value, gradient, changes = self.reduced(x, oracle)
        end = x - lr * pairs.times(gradient)
        added = state["sum"] + end
        if (int(state["steps_made"]) + 1) % self._pair_every == 0:
            mean, num_means = added / self._pair_every, int(state["means"])
            if num_means:
                move = mean - state["last_mean"]
                changes += pairs.add(move, oracle.hessian(mean)(move))
            changes += [(state["last_mean"], mean), (state["means"], num_means + 1.0)]
            added = added.new_zeros(added.shape)
        changes.append((state["sum"], added))
        return Taken(end, value, changes, {**self.metrics(gradient, oracle), "pairs": float(state["pairs"])})
