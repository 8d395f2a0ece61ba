"""A task with another loss or other metrics; everything else is the task's own, optional methods too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from torch import Tensor, nn

    from orchestray.platform.task import Batch, Task


class WrappedTask:
    """What a user's task is, unless a subclass says otherwise."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def build_model(self) -> nn.Module:
        return self.task.build_model()

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        return self.task.dataset(split)

    def to_batch(self, columns: pa.Table) -> Batch:
        return self.task.to_batch(columns)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return self.task.loss(outputs, batch)

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return self.task.metrics(outputs, batch)

    def __getattr__(self, name: str) -> Any:
        """The optional methods (`layers`, `tensor_plan`, ...) are there if the task has them."""
        if name == "task":  # not set yet: while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.task, name)
