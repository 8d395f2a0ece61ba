"""A check that no batch is overwritten by a later one: batches are made ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

_NUM_LOOKED_AT = 4


class Refills:
    """A watch on the first batch of a task, while the next few are made."""

    def __init__(self) -> None:
        self._first: list[Tensor] = []
        self._left = _NUM_LOOKED_AT

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """Return a batch that `make` makes.

        Raises:
            TrainingError: it lies in the memory of the first batch, and has changed that.
        """
        if not self._left:
            return make()
        first = self._first
        before = [tensor.clone() for tensor in first]
        batch = make()
        made = [tensor for tensor in tensors_in(batch) if _has_memory(tensor)]
        if not first:
            self._first = made
            return batch
        self._left -= 1
        if not self._left:
            self._first = []
        places = {tensor.untyped_storage().data_ptr() for tensor in made}
        # Memory alone is not a fault: a batch may hold what is the same for all.
        shared = [tensor.untyped_storage().data_ptr() in places for tensor in first]
        if any(is_shared and _differ(*each) for is_shared, *each in zip(shared, first, before, strict=True)):
            raise TrainingError(
                "The task's to_batch fills the memory of an earlier batch again. Batches are made ahead of their use, "
                "so the earlier one would be trained on with the samples of this one. Return new tensors in every "
                "call: .clone() of a buffer, torch.tensor(array) instead of torch.from_numpy(array)."
            )
        return batch


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0


def _differ(left: Tensor, right: Tensor) -> bool:
    return not bool(((left == right) | ((left != left) & (right != right))).all())  # NaN is NaN here
