"""Compressed sums in chunks: what a code sees of a tensor that chunks cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.sync.factory import make_exchange
from support.lockstep import Holder, exchange_by_hand, same_everywhere

SHAPES = ((9, 35), (4, 3, 7), (11,))


def rows_of_one_magnitude(rank: int, step: int) -> list[Tensor]:
    """Return the same gradients on all replicas: signs, times a power of two of each row of the first dimension."""
    signs = torch.Generator().manual_seed(step)
    drawn = [torch.randint(2, shape, generator=signs, dtype=torch.float64) * 2 - 1 for shape in SHAPES]
    sizes = [2.0 ** torch.arange(shape[0] if len(shape) > 1 else 1, dtype=torch.float64) for shape in SHAPES]
    return [sign * size.view(-1, *[1] * (sign.dim() - 1)) for sign, size in zip(drawn, sizes, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_scale_of_each_row_is_of_that_row_however_chunks_cut_a_tensor(size: int) -> None:
    def model() -> nn.Module:
        return Holder(SHAPES)

    section = {"type": "onebit", "scale": "row"}
    seen = exchange_by_hand(
        lambda: make_exchange(compression=section), size, 2, gradients=rows_of_one_magnitude, model=model
    )
    assert same_everywhere(seen)
    for step, sums in enumerate(seen[0].gradients, start=1):
        for found, own in zip(sums, rows_of_one_magnitude(0, step), strict=True):
            assert found is not None
            torch.testing.assert_close(found, size * own, rtol=1e-12, atol=0.0)
