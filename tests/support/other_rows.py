"""A task that divides its rows at random, and the ways in which processes may find them in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
from torch import nn

from support.training import Rows

Order = Callable[[int], Any]


class Divided(Rows):
    """A task that divides its rows at random into those to train on and those for validation."""

    def __init__(self, order: Order) -> None:
        rng = np.random.default_rng(0)
        super().__init__(
            rng.normal(size=(60, 4)),
            rng.integers(0, 2, size=60),
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        )
        self.order = order
        self.rows: dict[str, set[int]] = {}

    def dataset(self, split: str) -> pa.Table:
        order = [*map(int, self.order(60))]
        chosen = order[:48] if split == "train" else order[48:]
        self.rows[split] = set(chosen)
        return self.table.take(chosen)


def turned(size: int, calls: Iterator[int] = count()) -> Any:  # noqa: B008 - counts all calls
    return np.roll(np.arange(size), next(calls))


def shorter(size: int, calls: Iterator[int] = count()) -> Any:  # noqa: B008
    return range(size - next(calls))
