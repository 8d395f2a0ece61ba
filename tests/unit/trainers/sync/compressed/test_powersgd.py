"""PowerSGD: low-rank factors that are summed on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from orchestray.trainers.sync.compressed.powersgd import PowerSgd
from support.lockstep import SHAPES, exchange_by_hand, gradient, same_everywhere

Given = Callable[[int, int], list[Tensor]]


def of_rank(rank: int) -> Given:
    """Return gradients whose sum over replicas is a matrix of that rank."""

    def given(replica: int, step: int) -> list[Tensor]:
        every = gradient(replica, step)
        shared = torch.Generator().manual_seed(step)
        for number in (0, 3):
            rows, columns = SHAPES[number]
            left = torch.randn(rows, rank, dtype=torch.float64, generator=shared)
            right = torch.randn(rank, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))
            every[number] = left @ right
        every[2] = torch.zeros(SHAPES[2], dtype=torch.float64)
        return every

    return given


def given_to(seen: list[list[Tensor | None]], step: int, number: int) -> Tensor:
    tensor = seen[step - 1][number]
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_of_no_higher_rank_is_sent_without_loss(size: int) -> None:
    seen = exchange_by_hand(lambda: PowerSgd(rank=2), size, 3, gradients=of_rank(2))
    assert same_everywhere(seen)
    for step in (1, 2, 3):
        for number in (0, 1, 3, 4):
            wanted = torch.stack([of_rank(2)(rank, step)[number] for rank in range(size)]).sum(0)
            found = given_to(seen[0].gradients, step, number)
            assert float((found - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max())


def test_a_matrix_is_sent_again_after_a_step_in_which_its_gradient_was_zero() -> None:
    def given(replica: int, step: int) -> list[Tensor]:
        """Return gradients of zero, and then some without their first two rows."""
        every = of_rank(1)(replica, 1)
        for tensor in every:
            tensor *= step > 1
        every[0][:2] = 0.0
        return every

    seen = exchange_by_hand(lambda: PowerSgd(rank=1), 2, 3, gradients=given)
    assert bool(given_to(seen[0].gradients, 3, 0).any())


def test_all_columns_are_used_again_after_a_step_in_which_one_row_had_a_gradient() -> None:
    def given(replica: int, step: int) -> list[Tensor]:
        """Return gradients of one row, as of a table of tokens, and then of all but the first two."""
        every = of_rank(2)(replica, 2)
        every[0][:2] = 0.0
        if step == 1:
            every[0][3:] = 0.0
        return every

    seen = exchange_by_hand(lambda: PowerSgd(rank=2, error_feedback=False), 2, 4, gradients=given)
    wanted = torch.stack([given(rank, 4)[0] for rank in range(2)]).sum(0)
    torch.testing.assert_close(given_to(seen[0].gradients, 4, 0), wanted)


def test_what_is_given_to_the_optimizers_has_the_rank_asked_for() -> None:
    seen = exchange_by_hand(lambda: PowerSgd(rank=2), 2, 2)
    for number in (0, 3):
        singular = torch.linalg.svdvals(given_to(seen[0].gradients, 2, number))
        assert float(singular[2]) <= 1e-12 * float(singular[0])
        assert float(singular[1]) > 1e-3 * float(singular[0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_are_those_of_the_thin_factors(size: int) -> None:
    """Count (13 + 7) 2 and (40 + 11) 2 values of matrices, (3 + 20) 2 of the convolution, 5 + 1 raw."""
    seen = exchange_by_hand(lambda: PowerSgd(rank=2), size, 1)
    small = 8 * (len(SHAPES) + 8 * size)
    lefts, rights = 8 * (5 + 1 + 2 * (13 + 3 + 40)), 8 * 2 * (7 + 20 + 11)
    wanted = sum(-(-2 * (size - 1) * part // size) for part in (small, lefts, rights))
    assert [replica.bytes_sent[0] for replica in seen] == [wanted] * size


def test_a_matrix_that_factors_would_not_make_smaller_is_sent_as_it_is() -> None:
    seen = exchange_by_hand(lambda: PowerSgd(rank=8), 2, 1)
    for number in (0, 1, 2, 4):
        wanted = gradient(0, 1)[number] + gradient(1, 1)[number]
        assert torch.equal(given_to(seen[0].gradients, 1, number), wanted)
    assert seen[0].kept["residual"][0] is None
    assert seen[0].kept["residual"][3] is not None


def test_repeating_the_same_gradient_a_warm_start_finds_its_largest_directions() -> None:
    """Compare with power iteration, a step of it a step of the training (Vogels et al. 2019, theorem I)."""
    generator = torch.Generator().manual_seed(5)
    bases = [torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q for n in (40, 11)]
    sizes = torch.tensor([9.0, 8.0, *[3.0 / k for k in range(1, 10)]], dtype=torch.float64)
    matrix = bases[0][:, :11] * sizes @ bases[1].T
    best = float(sizes[2:].norm())

    def same(rank: int, step: int) -> list[Tensor]:
        every = gradient(rank, step)
        every[3] = matrix / 2
        return every

    seen = exchange_by_hand(lambda: PowerSgd(rank=2, error_feedback=False), 2, 12, gradients=same)
    lost = [float((given_to(seen[0].gradients, step, 3) - matrix).norm()) for step in (1, 2, 12)]
    assert lost[0] > lost[1] > lost[2]
    assert lost[2] == pytest.approx(best, rel=1e-6)
