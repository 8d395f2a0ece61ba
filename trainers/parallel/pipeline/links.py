"""Tensors between the stages of a pipeline: over a channel to another worker, or handed over within one.

Every pair of neighbouring workers shares one channel. Its messages are tagged with their stage and micro-batch, and a
worker keeps early ones until it needs them. So the two ends need not agree on an order, and no order that the data
allows can deadlock. Receives are posted ahead: tensors arrive while the worker computes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import ChannelError
from orchestray.platform.comm.collective import PeerLostError
from orchestray.trainers.parallel.pipeline.schedules.actions import Kind

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel, Handle, Message
    from orchestray.platform.process.wait_clock import Waiting
    from orchestray.trainers.parallel.pipeline.action_log import ActionLog, StepTimes

_RECEIVES_AHEAD = 3
"""Number of receives posted ahead on a channel: more would only move memory from the sender to the receiver."""


class Values(NamedTuple):
    """The values that cross the boundary of two stages, in either direction."""

    tensors: tuple[Tensor | None, ...]
    """Activations; or gradients, with None for a missing one."""
    needs_gradient: tuple[bool, ...]
    """For activations: True where the stage before wants a gradient."""


class Links:
    """The connections of one worker to the stages before and after its own.

    Args:
        workers: the worker that holds each stage.
        worker: this worker.
        channels: a channel to each worker that holds a neighbour of one of this worker's stages; closed with the links.
        device: device of received tensors.
        log: log whose step times are sent along with the tensors.
        waiting: counts how long this worker waits for the others.

    Every method raises PeerLostError when another worker is gone.
    """

    def __init__(
        self,
        workers: Sequence[int],
        worker: int,
        channels: Mapping[int, Channel],
        device: torch.device,
        log: ActionLog,
        waiting: Waiting,
    ) -> None:
        self._workers = list(workers)
        self._worker = worker
        self._channels = dict(channels)
        self._device = device
        self._log = log
        self._waiting = waiting
        self._posted: dict[int, deque[Handle[Message]]] = {peer: deque() for peer in channels}
        self._arrived: dict[str, deque[tuple[Values, StepTimes | None]]] = {}
        self._sends: dict[Kind, deque[Handle[None]]] = {Kind.FORWARD: deque(), Kind.BACKWARD: deque()}
        self._sent_bytes: dict[tuple[int, int], int] = {}
        try:
            for peer in channels:
                self._post(peer)
        except PeerLostError:  # one is gone already: let the others see that this worker goes, too
            self.close()
            raise

    def send(self, kind: Kind, stage: int, micro_batch: int, values: Values) -> None:
        """Send activations (FORWARD) to `stage` from the one before, or gradients (BACKWARD) from the one after.

        Returns at once. Activations must not be changed before `settle` has returned.
        """
        source = _source(kind, stage)
        peer = self._workers[stage]
        tag = _tag(kind, stage, micro_batch)
        if peer == self._worker:
            handed = tuple(None if tensor is None else tensor.detach() for tensor in values.tensors)
            self._arrived.setdefault(tag, deque()).append((Values(handed, values.needs_gradient), None))
            return
        present = [tensor.detach() for tensor in values.tensors if tensor is not None]
        flags = values.needs_gradient if kind is Kind.FORWARD else [tensor is not None for tensor in values.tensors]
        dense, orders = _in_memory_order(present)
        meta: dict[str, Any] = {"flags": [int(flag) for flag in flags], "step_times": self._log.step_times()}
        if orders:
            meta["orders"] = orders
        sends = self._sends[kind]
        try:
            while sends and sends[0].done():
                sends.popleft().wait()
            sends.append(self._channels[peer].isend(dense, tag=tag, meta=meta))
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        num_bytes = sum(tensor.nbytes for tensor in present)
        self._sent_bytes[source, stage] = self._sent_bytes.get((source, stage), 0) + num_bytes

    def receive(self, kind: Kind, stage: int, micro_batch: int) -> Values:
        """Return what `send` was given for this stage of ours; wait until it is there."""
        peer = self._workers[_source(kind, stage)]
        tag = _tag(kind, stage, micro_batch)
        while tag not in self._arrived:
            if peer == self._worker:
                raise RuntimeError(f"the program asks for {tag!r} before the stage that makes it has run")
            message = self._next(peer)
            step_times = tuple(message.meta["step_times"])
            self._arrived.setdefault(message.tag, deque()).append((self._unpacked(message), step_times))
        waiting = self._arrived[tag]
        values, times = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        if times is not None:
            self._log.take_in(times)
        return values

    def settle(self) -> None:
        """Wait until the sent activations have left: they may share memory with the model."""
        sends = self._sends[Kind.FORWARD]
        try:
            with self._waiting.during():
                while sends:
                    sends.popleft().wait()
        except ChannelError as error:
            raise PeerLostError(str(error)) from error

    def take_bytes_sent(self) -> dict[tuple[int, int], int]:
        """Return the bytes of tensors sent to other workers since the last call, by (from stage, to stage)."""
        sent, self._sent_bytes = self._sent_bytes, {}
        return sent

    def close(self) -> None:
        """Close the channels; waits at both ends then fail at once. May be called more than once, from any thread."""
        for channel in self._channels.values():
            channel.close()
        self._arrived.clear()

    def _post(self, peer: int) -> None:
        posted = self._posted[peer]
        try:
            while len(posted) < _RECEIVES_AHEAD:
                posted.append(self._channels[peer].irecv())
        except ChannelError as error:
            raise PeerLostError(str(error)) from error

    def _next(self, peer: int) -> Message:
        posted = self._posted[peer]
        try:
            if not posted:  # the channel ended, and what had arrived is used up
                posted.append(self._channels[peer].irecv())
            with self._waiting.during():
                message = posted.popleft().wait()
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        # If the peer is gone, what it sent before may be all that is needed; if not, the next wait fails.
        with contextlib.suppress(ChannelError):
            posted.append(self._channels[peer].irecv())
        return message

    def _unpacked(self, message: Message) -> Values:
        flags = tuple(bool(flag) for flag in message.meta["flags"])
        tensors = _in_given_order(message.tensors, message.meta.get("orders", {}))
        if self._device.type != "cpu":
            tensors = [tensor.to(self._device) for tensor in tensors]
        if message.tag.startswith(Kind.FORWARD):
            return Values(tuple(tensors), flags)
        there = iter(tensors)
        return Values(tuple(next(there) if flag else None for flag in flags), flags)


def _source(kind: Kind, stage: int) -> int:
    return stage - 1 if kind is Kind.FORWARD else stage + 1


def _tag(kind: Kind, stage: int, micro_batch: int) -> str:
    return f"{kind}{stage}.{micro_batch}"


def _in_memory_order(tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Permute each tensor's dimensions to the order of memory, where that makes it contiguous; return those orders too.

    A message is contiguous. A tensor that is not (channels last, a transposed matrix) must arrive with its own strides.
    Then the next stage computes the same bits as in one process.
    """
    dense, orders = [], {}
    for index, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            order = sorted(range(tensor.dim()), key=lambda dim, t=tensor: (-t.stride(dim), dim))  # type: ignore[misc]
            permuted = tensor.permute(order)
            if permuted.is_contiguous():
                orders[str(index)] = order
                tensor = permuted
        dense.append(tensor)
    return dense, orders


def _in_given_order(tensors: Sequence[Tensor], orders: Mapping[str, list[int]]) -> list[Tensor]:
    given = list(tensors)
    for index, order in orders.items():
        back = [order.index(dim) for dim in range(len(order))]
        given[int(index)] = given[int(index)].permute(back)
    return given
