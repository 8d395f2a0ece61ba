"""The outputs of all replicas, for a loss between samples (contrastive, triplet)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective


_SENT = {
    *(torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""Dtypes that the backends can send."""


class Gathering:
    """A function that joins the tensors of all replicas along their first dimension, in the order of the replicas.

    Every replica calls it with the same number of tensors, in the same order. The loss of a batch is the weighted mean
    of the replicas' losses, each of which may depend on all samples. So the gradient of a replica's tensors is the sum
    of what all these losses contribute.
    """

    def __init__(self, group: Callable[[], Collective]) -> None:
        """
        Args:
            group: returns the workers that hold the same part of the model.
        """
        self._group = group

    def __call__(self, values: Any) -> Any:
        """Return a tensor, or a tree of them, with the samples of all replicas.

        Raises:
            TrainingError: a tensor has no dimension of samples, or of its dtype none can be sent.
        """
        group = self._group()
        if group.size == 1:
            return values
        # The order of its operations is its own: the exchange's may run meanwhile.
        sibling = group.sibling("gather")

        def joined(value: Any) -> Any:
            return _Joined.apply(value, sibling) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]

        return pytree.tree_map(joined, values)


class _Joined(torch.autograd.Function):
    """An all-gather of tensors that may differ in their first dimension."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collective) -> Tensor:
        if not value.dim():
            raise TrainingError(
                "The task's loss gathers a tensor of a single number, which has no dimension of samples along which "
                "those of the workers are joined. Gather a value for each sample."
            )
        if value.dtype not in _SENT:
            raise TrainingError(
                f"The task's loss gathers a tensor of {value.dtype}, which workers cannot send. Convert it before, "
                "integers to torch.int64."
            )
        sizes = group.all_gather(torch.tensor([value.shape[0]])).flatten().tolist()
        padded = value.new_zeros((max(sizes), *value.shape[1:]))
        padded[: value.shape[0]] = value
        ctx.group, ctx.start, ctx.size = group, sum(sizes[: group.rank]), value.shape[0]
        return torch.cat([part[:size] for part, size in zip(group.all_gather(padded), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        ctx.group.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.size], None
