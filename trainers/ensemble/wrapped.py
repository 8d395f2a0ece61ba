"""A base class for tasks with another loss or other metrics; all else is the wrapped task's, optional methods too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from torch import Tensor, nn

    from orchestray.platform.task import Batch, Task


class WrappedTask:
    """A task that delegates to the user's task unless a subclass overrides a method."""

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
        """Look up optional methods (`layers`, `tensor_plan`, ...) in the wrapped task."""
        if name == "task":  # not set yet, while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.task, name)
