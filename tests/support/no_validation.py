"""Tasks without validation data."""

from __future__ import annotations

from typing import Any

from orchestray.trainers.core.wrapped_task import WrappedTask
from support.training import few_digits

WAYS = ("none", "empty", "not implemented")


class NoValidation(WrappedTask):
    """A small task whose training data are the usual ones, and whose validation data are missing."""

    def __init__(self, way: str = "none") -> None:
        super().__init__(few_digits())
        self._way = way

    def dataset(self, split: str) -> Any:
        table = self.task.dataset("train")
        if split == "train":
            return table
        if self._way == "not implemented":
            raise NotImplementedError("there is no such data")
        return None if self._way == "none" else table.slice(0, 0)  # type: ignore[union-attr]
