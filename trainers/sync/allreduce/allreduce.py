"""Synchronous data parallelism: all-reduce of the gradients in buckets, while the backward pass still runs.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020), sections 3.2.2
and 3.2.3: parameters are put into buckets in the reverse of their order, and a bucket is sent as soon as the backward
pass has filled it. Unlike in `DistributedDataParallel`, the reduced bucket *is* the gradients (no copy back). The last
bucket also sends what the loop needs from all replicas: which parameters were used, the sums of a few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, strided

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import DONE, Pending
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.buckets import Bucket, Filling, in_groups, number
from orchestray.trainers.sync.common.exact_sum import ExactSums
from orchestray.trainers.sync.common.exchange_base import ExchangeBase

_ALIGNMENT_BYTES = 64
_CACHED_BYTES = 1 << 20
"""Size of a bucket whose gradients are all in the processor's cache at the end of the backward pass."""


class AllReduce(ExchangeBase):
    """An all-reduce of the gradients; every replica ends a step with the same bits.

    The replicas scale their losses by num_samples / batch_samples, so the gradients are plainly summed. A parameter
    that is not used by any replica keeps `grad = None`; one that only some used gets the sum of their gradients.

    Args:
        bucket_mb: size of a bucket, in MiB; the first is at most 1 MiB, so that sending begins early.
        overlap: True to send during the backward pass; False to send after it (the result is the same bit for bit).
    """

    takes_complex = True

    def __init__(self, bucket_mb: float = 25.0, overlap: bool = True) -> None:
        super().__init__()
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._overlap = overlap
        self._filling: Filling[FlatBucket] | None = None
        self._sums: ExactSums | None = None
        self._num_sums = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `sums`: gradients of all replicas, added up for a step; empty before the first one."""
        return {"sums": self._num_sums} if self._num_sums else {}

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        if collective.size == 1:
            return
        buckets = [_lay_out(group) for group in in_groups(self._parameters, self._bucket_bytes)]
        number(buckets, self._parameters)
        self._sums = ExactSums(len(self._parameters), MAX_EXTRAS, collective.rank, collective.size)
        _place_sums(self._sums, buckets)
        self._filling = Filling(buckets, self._send, overlap=self._overlap)

    def detach(self) -> None:
        if self._filling is not None:
            self._filling.close()
        super().detach()
        self._sums = self._filling = None

    def before_step(self, step: int) -> None:
        super().before_step(step)
        if self._filling is not None:
            self._filling.begin()

    def begin_backward(self, last_micro_batch: bool) -> None:
        if self._filling is not None:
            self._filling.is_recording = last_micro_batch

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        filling, sums = self._filling, self._sums
        if filling is None or sums is None:
            return self._alone(extras)
        used = filling.complete(len(self._parameters))
        sums.write(used, extras)
        filling.send_rest()
        for bucket in filling.buckets:
            bucket.pending.wait()
        used_anywhere, totals = sums.read()
        self._num_sums += 1
        for bucket in filling.buckets:
            bucket.hand_out(used_anywhere)
        return totals[: len(extras)]

    def summary(self) -> dict[str, Any]:
        """Return the number of `buckets`, and how many of them the last step sent during the backward pass: `early`."""
        filling = self._filling
        return {} if filling is None else {"buckets": len(filling.buckets), "early": filling.num_early}

    def _send(self, bucket: FlatBucket) -> None:
        """Start to sum a bucket over the replicas, in place."""
        bucket.pending = self.joined().start_all_reduce(bucket.flat)


class FlatBucket(Bucket):
    """A bucket of gradients concatenated in one flat tensor."""

    def __init__(
        self, parameters: list[Tensor], offsets: list[int], numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.offsets = offsets
        self.pending: Pending = DONE
        self.flat = torch.empty(0, dtype=dtype, device=device)
        super().__init__(parameters)
        self.resize(numel)

    def resize(self, numel: int) -> None:
        self.flat = self.flat.new_zeros(numel)
        self.views = [
            _view_like(self.flat, offset, parameter)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def store(self, slots: Sequence[int]) -> None:
        parameters = [self.parameters[slot] for slot in slots]
        views = [self.views[slot] for slot in slots]
        gradients = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        torch._foreach_copy_(views, [each if each.layout is strided else each.to_dense() for each in gradients])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view  # frees the gradient's memory, still in the cache, for the next one

    def add(self, slot: int, parameter: Tensor) -> None:
        return  # autograd has added it to the view

    def store_zeros(self, slot: int) -> None:
        self.views[slot].zero_()

    def hand_out(self, used_anywhere: list[bool]) -> None:
        """Make the reduced values the parameters' gradients."""
        for slot, parameter in enumerate(self.parameters):
            if not used_anywhere[self.flags[slot]]:
                parameter.grad = None
            elif not self.ready[slot]:
                parameter.grad = self.views[slot]


def _place_sums(sums: ExactSums, buckets: list[FlatBucket]) -> None:
    """Put the sums at the end of the last bucket if its floats are wide enough, otherwise in a bucket of their own."""
    last = buckets[-1] if buckets else None
    if last is None or last.flat.dtype not in (torch.float32, torch.float64):
        device = last.flat.device if last is not None else torch.device("cpu")
        last = FlatBucket([], [], 0, torch.float64, device)
        buckets.append(last)
    num_slots = sums.num_slots(last.flat.dtype)
    start = last.flat.numel()
    last.resize(start + num_slots)
    last.held = True
    last.is_filled_at_once = last.flat.nbytes <= _CACHED_BYTES
    sums.use(last.flat[start:])


def _lay_out(group: list[Tensor]) -> FlatBucket:
    """Make a bucket in which every gradient begins at a multiple of 64 bytes, for
    the vector units; the gaps stay zero.
    """
    step = _ALIGNMENT_BYTES // group[0].element_size()
    offsets: list[int] = []
    numel = 0
    for parameter in group:
        offsets.append(numel)
        numel += -(-parameter.numel() // step) * step
    return FlatBucket(group, offsets, numel, group[0].dtype, group[0].device)


def _view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Return a view of `flat` with the shape of `parameter`, and its strides if it fills its memory without gaps."""
    # A fresh tensor of this format has the strides to compare; torch's own test imports its compiler (0.5 s).
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if dense.stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
