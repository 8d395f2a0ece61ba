"""Gradients gathered in buckets while the backward pass runs, each bucket sent as soon as it is full.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020), sections 3.2.2
and 3.2.3. This module decides when buckets are sent; a scheme decides on their memory layout and on how they are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError

_FIRST_BUCKET_BYTES = 1 << 20


class Bucket(ABC):
    """The gradients of a few parameters that are sent together."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.flags: list[int] = []
        """Index of each parameter among those of all buckets."""
        self.held = False
        """True if the bucket is not sent when full, but at the end of the backward pass."""
        self.is_filled_at_once = False
        """True if the gradients are put in together at the end of the backward pass, not each when it is there."""
        self.is_sent = False
        self.begin()

    def begin(self) -> None:
        """Empty the bucket for a new step."""
        self.ready = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)
        self.is_sent = False

    def put(self, slot: int) -> bool:
        """Take a parameter's gradient in; return True if this fills the bucket."""
        parameter = self.parameters[slot]
        if parameter.grad is None:
            return False
        if self.ready[slot]:
            if self.is_sent:
                raise TrainingError(
                    "A parameter got a second gradient in one backward pass, after its first was sent (re-entrant "
                    "checkpointing does that). Use torch.utils.checkpoint with use_reentrant=False, or set "
                    "strategy.exchange.overlap to false."
                )
            self.add(slot, parameter)
            return False
        self.store([slot])
        self.ready[slot] = True
        self.num_missing -= 1
        return self.num_missing == 0

    def complete(self, used: list[bool]) -> None:
        """Fill the gaps with zeros once the step has no more gradients, and set
        `used` for the parameters that had one.
        """
        # Earlier micro-batches may have used a parameter that the last one did not.
        late = [slot for slot, p in enumerate(self.parameters) if not self.ready[slot] and p.grad is not None]
        if late:
            self.store(late)
        for slot in late:
            self.ready[slot] = True
        self.num_missing -= len(late)
        for slot, flag in enumerate(self.flags):
            if self.ready[slot]:
                used[flag] = True
            else:
                self.store_zeros(slot)

    @abstractmethod
    def store(self, slots: Sequence[int]) -> None:
        """Copy the gradients of some parameters, of which none is None, into the bucket."""

    @abstractmethod
    def add(self, slot: int, parameter: Tensor) -> None:
        """Take in what autograd has accumulated into `parameter.grad` after `store`."""

    @abstractmethod
    def store_zeros(self, slot: int) -> None:
        """Store zeros for a parameter without a gradient on this replica."""


Kind = TypeVar("Kind", bound=Bucket)


class Filling(Generic[Kind]):
    """A driver that fills buckets from hooks on the parameters, and sends them in the same order on every replica."""

    def __init__(self, buckets: list[Kind], send: Callable[[Kind], None], *, overlap: bool) -> None:
        """
        Args:
            buckets: the buckets; each parameter is in one of them.
            send: starts to send a complete bucket.
            overlap: True to send during the backward pass; False to send when `send_rest` is called.
        """
        self.buckets = buckets
        self._send = send
        self._overlap = overlap
        self.is_recording = False
        """True if the following backward passes produce the gradients to send."""
        self._num_sent = 0
        self.num_early = 0
        """Number of buckets that the last step sent during the backward pass, before the last gradient was there."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for bucket in buckets:
            for slot, parameter in enumerate(() if bucket.is_filled_at_once else bucket.parameters):
                hook = partial(self._gradient_ready, bucket, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.is_recording = False
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.begin()

    def complete(self, num_flags: int) -> list[bool]:
        """End the step's gradients; return, for each parameter, True if this replica used it."""
        self.is_recording = False
        used = [False] * num_flags
        for bucket in self.buckets:
            bucket.complete(used)
        return used

    def send_rest(self) -> None:
        self.num_early = self._num_sent
        while self._num_sent < len(self.buckets):
            self._send_next()

    def close(self) -> None:
        self.is_recording = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _gradient_ready(self, bucket: Kind, slot: int, _: Tensor) -> None:
        if not (self.is_recording and bucket.put(slot) and self._overlap):
            return
        while self._num_sent < len(self.buckets):
            first = self.buckets[self._num_sent]
            if first.num_missing or first.held:
                return
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self._num_sent]
        self._num_sent += 1
        bucket.is_sent = True
        self._send(bucket)


def number(buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> None:
    """Set the flags of the buckets: each parameter's index in `parameters`."""
    order = {id(parameter): index for index, parameter in enumerate(parameters)}
    for bucket in buckets:
        bucket.flags = [order[id(parameter)] for parameter in bucket.parameters]


def in_groups(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Group parameters in reverse order, one kind (dtype, device) a group.

    A group is closed when it has `bucket_bytes` bytes (the first at most 1 MiB); unfinished groups come last.
    """
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
    return groups
