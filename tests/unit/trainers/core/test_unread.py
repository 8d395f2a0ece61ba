"""Numbers that stay on a device: the sums that replicas send are those of numbers that were read, bit for bit."""

from __future__ import annotations

import math
import random

import pytest
import torch

from orchestray.trainers.core.unread import Arriving, read_together
from orchestray.trainers.sync.common.exact_sum import ExactSums


def test_numbers_arrive_in_their_order_and_in_double_precision() -> None:
    values = [torch.tensor(0.1), torch.tensor([2.5], dtype=torch.float64), torch.tensor(7)]
    assert Arriving(values).read() == [float(torch.tensor(0.1)), 2.5, 7.0]
    assert read_together([1.5, torch.tensor(0.25), -3.0]) == [1.5, 0.25, -3.0]
    assert read_together([1.5]) == [1.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_that_was_not_read_is_summed_like_one_that_was(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30) for _ in range(200)] + [0.0, math.inf, math.nan, 1e300]
    for value in values:
        read, unread = ExactSums(1, 2, 0, 2), ExactSums(1, 2, 0, 2)
        slots = [torch.empty(read.num_slots(dtype), dtype=dtype) for _ in range(2)]
        read.use(slots[0])
        unread.use(slots[1])
        read.write([True], [value, 0.5])
        unread.write([True], [torch.tensor(value, dtype=torch.float64), 0.5])
        assert torch.equal(slots[0].nan_to_num(), slots[1].nan_to_num())
        assert torch.equal(slots[0].isnan(), slots[1].isnan())
