"""Backpropagation through time, written out for Elman's cell: whole, and truncated (Werbos 1990; Williams 1990)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestray.trainers.survey.operators.cells import CellWeights, elman, unrolled


@dataclass(frozen=True)
class ElmanGradients:
    """The gradients of a loss with respect to the weights of Elman's cell, in their shapes."""

    of_input: Tensor
    of_state: Tensor
    bias: Tensor
    """Gradient of either bias, as they are added."""
    state: Tensor
    """Gradient of the state before the first step, [samples, hidden]."""

    def flat(self) -> Tensor:
        """Return the gradients of the weights as one vector."""
        return torch.cat([self.of_input.flatten(), self.of_state.flatten(), self.bias])


def elman_gradients(
    weights: CellWeights, x: Tensor, state: Tensor, of_outputs: Tensor, steps: int | None = None
) -> ElmanGradients:
    """Return the gradients by the chain rule: dL/da_t = (dL/dh_t + W_h^T dL/da_t+1) (1 - h_t^2), from the last step on.

    Args:
        weights: weights of the cell, shared by all steps.
        x: inputs [times, samples, features].
        state: state before the first step, [samples, hidden].
        of_outputs: what the loss adds to the gradient of each output by itself, [times, samples, hidden].
        steps: number of steps after which the time is cut: no gradient crosses a cut, while states do. None: no cuts.
    """
    with torch.no_grad():
        outputs, _ = unrolled(elman, weights, x, (state,))
        before = torch.cat([state[None], outputs[:-1]])
        of_input, of_state = torch.zeros_like(weights.of_input), torch.zeros_like(weights.of_state)
        bias, from_later = torch.zeros_like(weights.bias_of_input), torch.zeros_like(state)
        for time in reversed(range(len(x))):
            of_sum = (of_outputs[time] + from_later) * (1 - outputs[time] ** 2)
            of_input += of_sum.t() @ x[time]
            of_state += of_sum.t() @ before[time]
            bias += of_sum.sum(0)
            is_cut = steps is not None and time % steps == 0
            from_later = torch.zeros_like(state) if is_cut else of_sum @ weights.of_state
        return ElmanGradients(of_input, of_state, bias, from_later)
