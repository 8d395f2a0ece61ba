"""The memory of a computation is what lives at a time, not the sum of what it makes."""

from __future__ import annotations

import torch

from orchestray.trainers.analysis.memory import peak_bytes


def test_released_tensors_make_room_and_views_take_none() -> None:
    kilo = 1000

    def compute() -> torch.Tensor:
        x = torch.zeros(kilo, dtype=torch.uint8)
        for _ in range(5):
            x = x[::1] + 1
        return x

    assert peak_bytes(compute) == 2 * kilo


def test_what_is_given_is_not_counted() -> None:
    given = torch.zeros(1000, dtype=torch.uint8)
    assert peak_bytes(lambda: given.add_(1)) == 0
    assert peak_bytes(lambda: given.reshape(10, 100)) == 0
