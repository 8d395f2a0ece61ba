"""Synchronous data parallelism: all-reduce of the gradients in buckets, while the backward pass still runs.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020), sections 3.2.2
and 3.2.3: parameters are put into buckets in the reverse of their order, and a bucket is sent as soon as the backward
pass has filled it. Unlike `DistributedDataParallel`, the reduced bucket *is* the gradients (no copy back), and what the
loop wants to know of all replicas (which parameters were used, the sums of a few numbers) rides in the last bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective, Pending, ring_bytes
from orchestray.platform.errors import TrainingError
from orchestray.trainers.exchange.base import MAX_EXTRAS, Held, Update
from orchestray.trainers.exchange.holdings import held_tensors, updated_whole
from orchestray.trainers.exchange.sums import ExactSums
from orchestray.trainers.layout.pieces import Piece

_FIRST_BUCKET_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64


class AllReduce:
    """All-reduce of the gradients; every replica ends a step with the same bits.

    The replicas scale their losses by num_samples / batch_samples, so the gradients are plainly summed. A parameter no
    replica used keeps `grad = None`; one that only some used gets the sum of what they have.

    Args:
        bucket_mb: size of a bucket, in MiB; the first is at most 1 MiB, so that sending begins early.
        overlap: send during the backward pass; False: after it (the result is the same bit for bit).
    """

    def __init__(self, bucket_mb: float = 25.0, overlap: bool = True) -> None:
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._overlap = overlap
        self._collective: Collective | None = None
        self._buckets: list[_Bucket] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._parameters: list[Tensor] = []
        self._sums: ExactSums | None = None
        self._recording = False
        self._num_started = 0
        self._bytes_sent = 0
        self._bytes_sent_total = 0
        self._held: dict[str, Held] = {}
        self._updates: list[Update] = []

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        self.detach()
        self._collective = collective
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._held = held_tensors(model, pieces, is_counted=collective.rank == 0)
        self._updates = updated_whole(model, self._held)
        if collective.size == 1:
            return
        self._buckets = _make_buckets(self._parameters, self._bucket_bytes)
        self._sums = ExactSums(len(self._parameters), MAX_EXTRAS, collective.rank, collective.size)
        self._place_sums()
        order = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for bucket in self._buckets:
            bucket.flags = [order[id(parameter)] for parameter in bucket.parameters]
            for slot, parameter in enumerate(bucket.parameters):
                hook = partial(self._gradient_ready, bucket, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self._handles, self._buckets, self._parameters = [], [], []
        self._collective = self._sums = None
        self._recording = False

    def updates(self) -> list[Update]:
        return self._updates

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def held(self) -> dict[str, Held]:
        return self._held

    def before_step(self, step: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.begin()
        self._num_started = 0
        self._bytes_sent = 0
        self._recording = False

    def begin_backward(self, last_micro_batch: bool) -> None:
        self._recording = last_micro_batch

    def finish(self, extras: Sequence[float]) -> list[float]:
        if len(extras) > MAX_EXTRAS:
            raise ValueError(f"At most {MAX_EXTRAS} numbers ride along with the gradients; got {len(extras)}.")
        self._recording = False
        collective, sums = self._joined()
        if collective.size == 1 or sums is None:
            return [float(extra) for extra in extras]
        used = [False] * len(self._parameters)
        for bucket in self._buckets:
            bucket.complete(used)
        sums.write(used, extras)
        while self._num_started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.wait()
        self._hand_out(sums.used_anywhere())
        return sums.read()[: len(extras)]

    def after_step(self, step: int) -> None:
        return

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            raise TrainingError(f"The exchange 'allreduce' keeps no state, but was given {sorted(tensors)}.")

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_sent_total(self) -> int:
        return self._bytes_sent_total

    @property
    def bytes_dense_total(self) -> int:
        return self._bytes_sent_total

    def _joined(self) -> tuple[Collective, ExactSums | None]:
        if self._collective is None:
            raise TrainingError("The exchange is not attached to a model and a collective.")
        return self._collective, self._sums

    def _place_sums(self) -> None:
        """Give the sums their room: at the end of the last bucket if it counts in floats wide enough, else alone."""
        assert self._sums is not None
        last = self._buckets[-1] if self._buckets else None
        if last is None or last.flat.dtype not in (torch.float32, torch.float64):
            device = last.flat.device if last is not None else torch.device("cpu")
            last = _Bucket([], [], 0, torch.float64, device)
            self._buckets.append(last)
        num_slots = self._sums.num_slots(last.flat.dtype)
        start = last.flat.numel()
        last.resize(start + num_slots)
        last.held = True
        self._sums.use(last.flat[start:])

    def _gradient_ready(self, bucket: _Bucket, slot: int, parameter: Tensor) -> None:
        if not self._recording:
            return
        if bucket.put(slot, parameter) and self._overlap:
            self._start_full()

    def _start_full(self) -> None:
        """Send what is full, in the order of the buckets: it must be the same on every replica."""
        buckets = self._buckets
        while self._num_started < len(buckets) and buckets[self._num_started].is_full:
            self._start_next()

    def _start_next(self) -> None:
        collective, _ = self._joined()
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        bucket.pending = collective.start_all_reduce(bucket.flat)
        num_bytes = ring_bytes(bucket.flat, collective.size)
        self._bytes_sent += num_bytes
        self._bytes_sent_total += num_bytes

    def _hand_out(self, used_anywhere: list[bool]) -> None:
        if all(used_anywhere):
            for bucket in self._buckets:
                bucket.hand_out()
            return
        for bucket in self._buckets:
            bucket.hand_out(used_anywhere)


class _Bucket:
    """Gradients side by side in one flat tensor."""

    def __init__(
        self, parameters: list[Tensor], offsets: list[int], numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.parameters = parameters
        self.offsets = offsets
        self.flags: list[int] = []
        self.held = False
        """It waits for `finish`, which writes into it."""
        self.pending: Pending | None = None
        self.flat = torch.zeros(numel, dtype=dtype, device=device)
        self.resize(numel)
        self.begin()

    def resize(self, numel: int) -> None:
        self.flat = self.flat.new_zeros(numel)
        self.views = [
            _view_like(self.flat, offset, parameter)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def begin(self) -> None:
        self.ready = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)
        self.pending = None

    @property
    def is_full(self) -> bool:
        return self.num_missing == 0 and not self.held

    def put(self, slot: int, parameter: Tensor) -> bool:
        """Move a gradient in; True if the bucket is full by it."""
        if self.ready[slot]:
            return self._put_again()
        gradient, view = parameter.grad, self.views[slot]
        if gradient is None:
            return False
        view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
        parameter.grad = view  # frees the gradient's memory, still in the cache, for the next one
        self.ready[slot] = True
        self.num_missing -= 1
        return self.num_missing == 0

    def _put_again(self) -> bool:
        if self.pending is not None:
            raise TrainingError(
                "A parameter got a second gradient in one backward pass, after its first was sent (re-entrant "
                "checkpointing does that). Use torch.utils.checkpoint with use_reentrant=False, or set "
                "strategy.exchange.overlap to false."
            )
        return False  # autograd has added it to the view

    def complete(self, used: list[bool]) -> None:
        """No more gradients come in this step: fill the gaps with zeros, and note in `used` what there was."""
        for slot, flag in enumerate(self.flags):
            if self.ready[slot]:
                used[flag] = True
                continue
            # Earlier micro-batches may have used a parameter that the last one did not.
            if self.parameters[slot].grad is not None:
                self.put(slot, self.parameters[slot])
                used[flag] = True
            else:
                self.views[slot].zero_()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def hand_out(self, used_anywhere: list[bool] | None = None) -> None:
        """Make the reduced values the parameters' gradients."""
        for slot, parameter in enumerate(self.parameters):
            if used_anywhere is not None and not used_anywhere[self.flags[slot]]:
                parameter.grad = None
            elif not self.ready[slot]:
                parameter.grad = self.views[slot]


def _make_buckets(parameters: list[Tensor], bucket_bytes: int) -> list[_Bucket]:
    """Parameters in reverse order, one kind (dtype, device) a bucket, the bucket begun last closed last."""
    open_by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    groups: list[list[Tensor]] = []
    limit = min(_FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group = open_by_kind.setdefault(kind, [])
        group.append(parameter)
        filled[kind] = filled.get(kind, 0) + parameter.nbytes
        if filled[kind] >= limit:
            groups.append(open_by_kind.pop(kind))
            del filled[kind]
            limit = bucket_bytes
    groups.extend(open_by_kind.values())
    return [_lay_out(group) for group in groups]


def _lay_out(group: list[Tensor]) -> _Bucket:
    """Every gradient begins at a multiple of 64 bytes, for the vector units; the gaps stay zero."""
    step = _ALIGNMENT_BYTES // group[0].element_size()
    offsets: list[int] = []
    numel = 0
    for parameter in group:
        offsets.append(numel)
        numel += -(-parameter.numel() // step) * step
    return _Bucket(group, offsets, numel, group[0].dtype, group[0].device)


def _view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view of `flat` with the shape of `parameter`, and its strides if it fills its memory without gaps."""
    # What a fresh tensor of this format would have; torch's own test for it imports its compiler, which costs 0.5 s.
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    if dense.stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
