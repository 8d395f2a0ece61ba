"""PowerSGD as a code: projections of low rank that follow the gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from orchestray.trainers.compression.powersgd import PowerSgd, orthonormal


def matrix_of_rank(rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, rank, dtype=torch.float64, generator=generator) for n in (40, 30))
    return left @ right.T


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_that_rank_arrives_whole(rank: int) -> None:
    given = matrix_of_rank(rank)
    compressor = PowerSgd(rank)
    compressor.init([given])
    found = compressor.decompress(compressor.compress([given], step=1))[0]
    torch.testing.assert_close(found, given, rtol=0, atol=1e-11)


def test_what_a_message_stands_for_is_the_gradient_on_the_columns_it_sends() -> None:
    given = matrix_of_rank(30)
    compressor = PowerSgd(2)
    compressor.init([given])
    message = compressor.compress([given], step=1)
    left = message[: 40 * 2 * 8].clone().view(torch.float64).view(40, 2)
    torch.testing.assert_close(left.T @ left, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(compressor.decompress(message)[0], left @ (left.T @ given), rtol=0, atol=1e-12)


def test_from_a_warm_start_the_same_gradient_is_met_better_each_time_up_to_the_best_there_is() -> None:
    given = matrix_of_rank(30)
    best = float(torch.linalg.svdvals(given)[2:].norm())
    compressor = PowerSgd(2, error_feedback=False)
    compressor.init([given])
    errors = []
    for step in range(1, 200):
        compressor.compress([given], step=step)
        errors.append(compressor.error_norm)
    assert errors[0] > 1.02 * best
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(errors))
    assert errors[-1] == pytest.approx(best, rel=1e-6)


def test_a_gradient_of_zeros_does_not_stop_the_iteration() -> None:
    compressor = PowerSgd(2)
    compressor.init([matrix_of_rank(2)])
    compressor.compress([torch.zeros(40, 30, dtype=torch.float64)], step=1)
    given = matrix_of_rank(2)
    found = compressor.decompress(compressor.compress([given], step=2))[0]
    torch.testing.assert_close(found, given, rtol=0, atol=1e-11)


def test_a_kernel_is_a_matrix_with_a_row_an_output_and_vectors_are_sent_as_they_are() -> None:
    kernel, bias = torch.randn(8, 4, 3, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    compressor = PowerSgd(1)
    compressor.init([bias, kernel])
    assert compressor.message_bytes == 8 * (8 + 8 + 36)
    found = compressor.decompress(compressor.compress([bias, kernel], step=1))
    assert torch.equal(found[0], bias)
    assert torch.linalg.matrix_rank(found[1].view(8, 36)) == 1


def test_columns_that_depend_on_one_another_are_made_orthonormal_all_the_same() -> None:
    column = torch.randn(20, 1, dtype=torch.float64)
    for matrix in (column.repeat(1, 3), torch.zeros(20, 3, dtype=torch.float64)):
        found = orthonormal(matrix)
        torch.testing.assert_close(found.T @ found, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
