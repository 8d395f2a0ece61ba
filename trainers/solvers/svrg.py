"""SVRG: stochastic gradients of reduced variance."""

from __future__ import annotations

from torch import Tensor

from orchestray.trainers.solvers.base import Changes, Oracle, Solver, Taken, number


class Svrg(Solver):
    """Stochastic variance-reduced gradients (R. Johnson, T. Zhang, NeurIPS 2013, figure 1, option I).

        x <- x - lr (grad f(x) - grad f(anchor) + the whole gradient at the anchor)

    f is the batch's loss. Now and then the weights become the anchor, and a pass over the whole data gives its
    gradient. The mean of the direction is the gradient; its variance goes to 0 as weights and anchor go to the minimum,
    so that a constant rate converges linearly on strongly convex losses.
    """

    def __init__(self, anchor_every_steps: int | None = None) -> None:
        """
        Args:
            anchor_every_steps: number of steps between two anchors; None: an epoch.
        """
        super().__init__()
        self._every = anchor_every_steps

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {"anchor": x.new_zeros(x.numel()), "whole_gradient": x.new_zeros(x.numel()), "steps_made": number(x)}

    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        value, gradient, changes = self.reduced(x, oracle)
        return Taken(x - lr * gradient, value, changes, self.metrics(gradient, oracle))

    def metrics(self, gradient: Tensor, oracle: Oracle) -> dict[str, float]:
        """Return the norm of the gradient of reduced variance, and the number of steps since the anchor was set."""
        age = int(self.state["steps_made"]) % (self._every or oracle.num_batches)
        return {"grad_norm": float(gradient.norm()), "anchor_age": float(age)}

    def reduced(self, x: Tensor, oracle: Oracle) -> tuple[float, Tensor, Changes]:
        """Return the batch's loss, the gradient of reduced variance, and the changes of anchor and count."""
        state, made = self.state, int(self.state["steps_made"])
        anchor, whole = state["anchor"], state["whole_gradient"]
        changes: Changes = [(state["steps_made"], made + 1.0)]
        if made % (self._every or oracle.num_batches) == 0:
            anchor, whole = x, oracle.whole_gradient(x)
            changes += [(state["anchor"], anchor), (state["whole_gradient"], whole)]
        value, gradient = oracle.gradient(x)
        _, at_anchor = oracle.gradient(anchor)
        return value, gradient - at_anchor + whole, changes
