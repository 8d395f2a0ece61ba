"""Recurrent cells by their equations are the layers of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.trainers.survey.lab.defining import CELLS
from orchestray.trainers.survey.operators.cells import CellWeights, unrolled


@pytest.mark.parametrize(("steps", "samples", "features", "hidden"), [(1, 1, 1, 1), (5, 3, 4, 6), (9, 2, 7, 3)])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_by_its_equations_has_torch_s_outputs_states_and_gradients(
    name: str, steps: int, samples: int, features: int, hidden: int
) -> None:
    cell, layer, num_states = CELLS[name]
    torch.manual_seed(steps)
    network = layer(features, hidden).double()  # type: ignore[call-arg,arg-type]
    x = torch.randn(steps, samples, features, dtype=torch.float64, requires_grad=True)
    first = tuple(torch.randn(samples, hidden, dtype=torch.float64) for _ in range(num_states))
    ours, last = unrolled(cell, CellWeights.of_layer(network), x, first)
    given = tuple(each[None] for each in first)
    torchs, last_of_torch = network(x, given if num_states > 1 else given[0])
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack(last), torch.cat([*last_of_torch]).reshape(num_states, samples, hidden))
    wanted = [x, *network.parameters()]
    by_hand, of_torch = (torch.autograd.grad(each.square().sum(), wanted) for each in (ours, torchs))
    for one, two in zip(by_hand, of_torch, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_a_gru_has_three_quarters_and_elman_s_cell_a_quarter_of_the_parameters_of_an_lstm() -> None:
    counts = {
        name: sum(each.numel() for each in layer(11, 7).parameters())  # type: ignore[call-arg,arg-type]
        for name, (_, layer, _) in CELLS.items()
    }
    assert 4 * counts["GRU"] == 3 * counts["LSTM"]
    assert 4 * counts["Elman"] == counts["LSTM"]


def test_the_weights_of_an_upper_layer_are_those_of_its_name() -> None:
    network = nn.LSTM(3, 4, 2)
    assert CellWeights.of_layer(network, 1).of_input is network.weight_ih_l1
