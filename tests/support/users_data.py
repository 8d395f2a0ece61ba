"""A small task whose training data are of every kind that users bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from orchestray.platform.data.endless import Endless
from orchestray.platform.data.mix import Mix
from orchestray.trainers.core.wrapped_task import WrappedTask
from support.training import few_digits

KINDS = ("mix", "endless", "changed")


class UsersData(WrappedTask):
    """The digits, mixed of two parts, read without end, or changed at random."""

    def __init__(self, kind: str) -> None:
        super().__init__(few_digits())
        self.kind = kind

    def dataset(self, split: str) -> Any:
        table: Any = self.task.dataset(split)
        if split == "validation" or self.kind == "changed":
            return table
        if self.kind == "mix":
            return Mix([table.slice(0, 400), table.slice(400)], [2, 1], num_rows=100)

        def read(number: int) -> Iterator[pa.Table]:
            yield from (table.slice(start, 30) for start in range(0, 150, 30))

        return Endless(read, window_rows=50)

    def to_training_batch(self, columns: pa.Table, draws: Any) -> dict[str, Tensor]:
        batch = self.to_batch(columns)
        if self.kind == "changed":
            noise = np.stack([each.normal(0.0, 0.3, batch["inputs"].shape[1]) for each in draws])
            batch["inputs"] = batch["inputs"] + torch.from_numpy(noise).to(torch.float32)
        return batch
