"""Backpropagation through time by the chain rule written out is autograd's, whole and cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.survey.operators.bptt import elman_gradients
from orchestray.trainers.survey.operators.cells import CellWeights, elman, unrolled

STEPS, SAMPLES, FEATURES, HIDDEN = 11, 3, 4, 5


def case() -> tuple[nn.RNN, Tensor, Tensor, Tensor]:
    """Return a network, its inputs, its first state, and weights of the outputs in a loss that adds them."""
    torch.manual_seed(0)
    network = nn.RNN(FEATURES, HIDDEN).double()
    x, state = torch.randn(STEPS, SAMPLES, FEATURES).double(), torch.randn(SAMPLES, HIDDEN).double()
    return network, x, state, torch.randn(STEPS, SAMPLES, HIDDEN).double()


def by_autograd(network: nn.RNN, x: Tensor, state: Tensor, of_outputs: Tensor, steps: int) -> list[Tensor]:
    """Return the gradients of input weights, state weights and bias by torch, with the state detached at each cut."""
    loss, now = torch.zeros((), dtype=torch.float64), state[None]
    for part, wanted in zip(x.split(steps), of_outputs.split(steps), strict=True):
        outputs, now = network(part, now.detach())
        loss = loss + (outputs * wanted).sum()
    return list(torch.autograd.grad(loss, [network.weight_ih_l0, network.weight_hh_l0, network.bias_ih_l0]))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, STEPS - 1, STEPS, STEPS + 9])
def test_the_gradient_written_out_is_torch_s_whole_and_cut(steps: int) -> None:
    network, x, state, of_outputs = case()
    found = elman_gradients(CellWeights.of_layer(network), x, state, of_outputs, steps)
    expected = by_autograd(network, x, state, of_outputs, steps)
    for one, two in zip((found.of_input, found.of_state, found.bias), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_a_cut_after_the_last_step_is_none_and_an_earlier_one_changes_the_gradient() -> None:
    network, x, state, of_outputs = case()
    weights = CellWeights.of_layer(network)
    whole = elman_gradients(weights, x, state, of_outputs).flat()
    assert torch.equal(elman_gradients(weights, x, state, of_outputs, STEPS).flat(), whole)
    assert (
        float((elman_gradients(weights, x, state, of_outputs, STEPS - 1).flat() - whole).norm()) > 1e-3 * whole.norm()
    )


def test_the_gradient_of_the_first_state_is_autograd_s_and_nothing_crosses_a_cut() -> None:
    network, x, state, of_outputs = case()
    weights, leaf = CellWeights.of_layer(network), state.clone().requires_grad_()
    (expected,) = torch.autograd.grad((unrolled(elman, weights, x, (leaf,))[0] * of_outputs).sum(), leaf)
    torch.testing.assert_close(elman_gradients(weights, x, state, of_outputs).state, expected)
    assert not elman_gradients(weights, x, state, of_outputs, 3).state.any()
