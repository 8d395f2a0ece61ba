"""A base class for tasks with another loss or other metrics; all else is the wrapped task's, optional methods too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.core.task_calls import Gather, alone, loss_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from torch import Tensor, nn

    from orchestray.platform.task import Batch, Task


class WrappedTask:
    """A task that delegates to the user's task unless a subclass overrides a method.

    Attributes:
        task: the user's task.
        asks_as: the task whose loss may ask for arguments.
        given: what `loss` was called with last; a validation calls it before `metrics`, which may need it as well.
    """

    def __init__(self, task: Task) -> None:
        self.task = self.asks_as = task
        self.given: dict[str, Any] = {}

    def build_model(self) -> nn.Module:
        return self.task.build_model()

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        return self.task.dataset(split)

    def to_batch(self, columns: pa.Table) -> Batch:
        return self.task.to_batch(columns)

    def loss(self, outputs: Any, batch: Batch, *, step: int = 1, gather: Gather = alone) -> Tensor:
        self.given = {"step": step, "gather": gather}
        return loss_of(self.task, outputs, batch, **self.given)

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return self.task.metrics(outputs, batch)

    def __getattr__(self, name: str) -> Any:
        """Look up optional methods (`layers`, `tensor_plan`, ...) in the wrapped task."""
        if name in ("task", "asks_as"):  # not set yet, while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.task, name)
