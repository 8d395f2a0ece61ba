"""The operators of feed-forward networks, computed number by number, are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.survey.lab.defining import LOSSES, OPERATORS
from orchestray.trainers.survey.operators import feed_forward


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("seed", range(4))
def test_an_operator_by_its_definition_is_torch_s_on_random_shapes(name: str, seed: int) -> None:
    ours, torchs, _ = OPERATORS[name](torch.Generator().manual_seed(seed))
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_a_loss_by_its_formula_is_torch_s_and_the_task_s_and_so_is_its_gradient(name: str, seed: int) -> None:
    (loss, gradient), of_torch, (of_task, gradient_of_task) = LOSSES[name](torch.Generator().manual_seed(seed))
    assert loss > 0
    for other in (of_torch, of_task):
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, gradient_of_task, rtol=1e-12, atol=1e-12)


def test_a_convolution_has_the_height_and_width_of_its_inputs_less_those_of_the_kernel_plus_one() -> None:
    x, weight = torch.randn(2, 3, 7, 9), torch.randn(4, 3, 3, 2)
    assert feed_forward.convolution(x, weight).shape == (2, 4, 7 - 3 + 1, 9 - 2 + 1)


def test_a_convolution_does_not_turn_its_kernel_round() -> None:
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    weight = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    assert feed_forward.convolution(x, weight).flatten().tolist() == [0, 1, 3, 4]


def test_softmax_takes_numbers_whose_powers_are_too_large() -> None:
    x = torch.tensor([[1000.0, 1001.0], [-1000.0, 0.0]], dtype=torch.float64)
    found: Tensor = feed_forward.softmax(x)
    torch.testing.assert_close(found, functional.softmax(x, dim=1))
