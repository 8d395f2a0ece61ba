"""A worker's connection to the servers: orders from the lead, gradients to every shard, parameters from every shard.

All shards are sent their requests at once. A request that was in progress when a server was lost is sent again to the
server that replaces it. The servers apply no share twice, so a worker never needs to know whether the request had
arrived.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel
from orchestray.platform.comm.channel.blocks import SharedBlock
from orchestray.platform.process.pulse import PULSE
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.ps.protocol.assignments import Compute, Deposit, Order, Save, Validate
from orchestray.trainers.ps.protocol.buffers import NO_CHANGE, BufferPush, Buffers
from orchestray.trainers.ps.protocol.encoding import Gradient, GradientEncoder
from orchestray.trainers.ps.protocol.messages import Asked, Link
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import (
    Answer,
    Asking,
    Origin,
    Part,
    Pull,
    Push,
    Report,
    Request,
    Snapshot,
    Traffic,
    Validated,
)
from orchestray.trainers.ps.worker.push_handle import PushHandle, PushResult


class ShardClient:
    """A client of one worker, used by one thread.

    Attributes:
        values: all parameters, flat, as `pull` fills them. With `stays_there` it is another tensor after each pull: the
            server's memory, or a view of it that is writable and must not be written to.
        home: this worker's own memory, which `pull` fills if the parameters do not stay with the server.
        versions: version of the parameters in `values`, by shard.
        pulls_changes: True to pull only what has changed, if that is less; nobody else may change `values` then.
        holding: ids of the orders that were received and not reported on.
        encoder: encoder of gradients, for each shard.
        waited_s: seconds spent waiting for answers, and for servers that replace lost ones.
        run_state: state of the run that the lead sent with the last snapshot.
        others_bytes: bytes that other stages of this worker, and their servers, have sent.
        others_saved: bytes that other stages' compressors have saved.
        others_errors: norms of the residuals of other stages' compressors.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        partition: Partition,
        worker: int,
        values: Tensor,
        *,
        buffers: Buffers | None = None,
        compressors: Sequence[Compressor] | None = None,
        replace: Callable[[int, Exception], Channel] | None = None,
        block: SharedBlock | None = None,
        stays_there: bool = False,
        pulls_changes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            channels: channels to the shards, in their order; the first is the lead.
            partition: partition of the parameters.
            worker: number by which the coordinator knows this worker.
            values: `[elements]`, contiguous; best the memory of the model's parameters (`FlatModel.values`).
            buffers: filled by `pull` with the lead's buffers; None: it has none.
            compressors: compressors of gradients, one per shard; initialised here.
            replace: called when the channel to a shard is lost, with the shard and the error. It blocks until the
                shard's new server can be reached, and returns a channel to it. None: the error is raised.
            block: memory for `values` and for pushed gradients. Servers of this machine read and write them there, if
                they are not sent in another form. It must be this client's alone: a server that an earlier client has
                left may still be reading the earlier block.
            stays_there: initial value of the property.
            pulls_changes: initial value of the attribute.
            clock: returns seconds.
        """
        self.worker = worker
        self.values = self.home = values
        self.buffers = buffers
        self.holding: list[int] = []
        self.waited_s = 0.0
        self._clock, self._is_waiting = clock, False
        # A push is dropped only if this worker was given up while its server was replaced.
        self.encoder = GradientEncoder(partition, values, compressors, can_take_back=replace is not None)
        self.run_state: Mapping[str, Any] = {}
        self.others_bytes = self.others_saved = 0
        self.others_errors: Sequence[float] = ()
        self._bytes_reported = self._saved_reported = 0
        """Bytes that the other shards sent and received, as far as the lead has been sent them."""
        self._partition = partition
        self._parts = partition.cut(values)
        another = None if replace is None else partial(self._wait_for_another, replace)
        self._links = [
            Link(shard, channel, worker, replace=another, block=block) for shard, channel in enumerate(channels)
        ]
        self.versions = [0] * len(self._links)
        self._reads_version: int | None = None
        """Version of the server's memory that `values` is, or was last."""
        self.stays_there = stays_there
        self.pulls_changes = pulls_changes
        self._holds_all = False
        """True once all parameters have been pulled."""
        self._warnings: list[str] = []
        """All warnings for the user."""
        self._num_told = 0
        """Number of those that have been sent to the lead."""

    @property
    def stays_there(self) -> bool:
        """True if pulled parameters are left in the server's memory, if the server is on this machine.

        Then `values` is that memory, which stays unchanged until `values` is newer. Only with one shard.
        """
        return self._reads_version is not None

    @stays_there.setter
    def stays_there(self, stays: bool) -> None:
        if stays and self._reads_version is None and len(self._links) == 1:
            self._reads_version = -1
        elif not stays:
            self._reads_version = None
            if self.values is not self.home:
                self.values = self.home.copy_(self.values)

    def warn(self, text: str) -> None:
        """Add a warning for the user, which goes to the lead with the next traffic report."""
        self._warnings.append(text)

    # -- orders --------------------------------------------------------------------------------------------------------

    def hello(self, *, is_new: bool = True, data: Mapping[str, list[int]] | None = None) -> None:
        """Introduce this worker to all servers.

        Args:
            is_new: True if the worker holds nothing; False: it continues with what it held.
            data: marks of its data by split (`mark_of`).
        """
        self._all([link.ask(link.hello(is_new=is_new, data=data)) for link in self._links])

    def next(self, *, wait: bool = True) -> Order:
        """Return the next order, once there is one; with `wait=False` it may be `Wait`."""
        return self._received(self._ask_lead(Request(next=self._asking(wait), tally=self._tally())).order)

    def watch(self, order: Compute) -> Asked:
        """Ask the lead to say when another worker has done an order; a later request ends the wait."""
        return self._links[0].ask(Request(watch=order.order_id))

    def give_up(self, order: Compute) -> None:
        """Forget an order that another worker has done."""
        self._drop([order.order_id])

    def validated(self, order: Validate, sums: Mapping[str, float]) -> dict[str, float] | None:
        """Report a part of a validation; return the means if it was the last part."""
        return self._ask_lead(Request(validated=Validated(order.order_id, dict(sums))), ends=[order.order_id]).means

    def saved(self, order: Save) -> bool:
        """Report a checkpoint as written; return False if the order belongs to another worker by now."""
        return self._ask_lead(Request(saved=order.order_id), ends=[order.order_id]).saved

    def deposited(self, order: Deposit) -> None:
        """Report that all shards have a copy of the compressors' state."""
        self._ask_lead(Request(deposited=order.order_id), ends=[order.order_id])

    def ask_each(self, requests: Sequence[tuple[Request, Sequence[Tensor]]]) -> list[tuple[Answer, Sequence[Tensor]]]:
        """Send each shard a request of its own, with tensors, all at once; return the answers and their tensors."""
        asked = [link.ask(*request) for link, request in zip(self._links, requests, strict=True)]
        return [(answer, one.tensors) for answer, one in zip(self._all(asked), asked, strict=True)]

    # -- parameters ----------------------------------------------------------------------------------------------------

    def pull(self, min_version: int = 0, *, only_newer: bool = False) -> list[int]:
        """Fill `values` (and `buffers`) with the parameters.

        Args:
            min_version: number of steps whose updates they must hold, as given by an order.
            only_newer: True to skip the shards that have nothing new.

        Returns:
            The version of each shard's parameters.
        """
        asked = []
        for shard, link in enumerate(self._links):
            newer_than = self.versions[shard] if only_newer else None
            since = self._since(shard)
            pull = Pull(min_version, newer_than, self._reads_version, since)
            into = self._targets(shard, self._parts) if since is None else None
            asked.append(link.ask(Request(pull=pull), into=into, always=not only_newer))
        for shard, answer in enumerate(self._all(asked)):
            self.versions[shard] = answer.version
            self._adopt(shard, asked[shard])
        self._holds_all = True
        return list(self.versions)

    def snapshot(self, step: int | None = None) -> list[dict[str, Tensor]]:
        """Return `values` and the optimizer's state of each shard, by name; see `ShardServer.snapshot`."""
        found = self.ask_each([(Request(snapshot=Snapshot(step)), ())] * len(self._links))
        self.run_state = json.loads(found[0][0].run_state or "{}")
        return [dict(zip(answer.names, tensors, strict=True)) for answer, tensors in found]

    # -- gradients -----------------------------------------------------------------------------------------------------

    def push(self, orders: Sequence[Compute], gradient: Gradient, **rest: Any) -> PushResult:
        """Send a gradient to all shards and wait for the end of the push; same arguments as for `start_push`."""
        return self.start_push(orders, gradient, **rest).wait()

    def start_push(
        self,
        orders: Sequence[Compute],
        gradient: Gradient,
        *,
        loss_sums: Sequence[float] | None,
        unused: Sequence[str] = (),
        buffers: BufferPush | None = None,
        measured: Sequence[Tensor] = (),
        versions: Sequence[int] | None = None,
        pull_into: Tensor | None = None,
        next_order: bool | None = None,
    ) -> PushHandle:
        """Send a gradient to all shards.

        Args:
            orders: orders of the shares whose gradients it sums, each weighted by num_samples / batch_samples.
            gradient: gradient, which must not change until the push has ended.
            loss_sums: part of the batch's mean loss, for each order; None: the caller acknowledges the shares.
            unused: parameters that no share had a gradient for.
            buffers: changes that the shares made to the model's buffers, if the lead has buffers.
            measured: what was measured for each shard's optimizer (`Optimizer.measurements`); empty: nothing is.
            versions: versions of the parameters it was computed with; default: those of the last pull.
            pull_into: filled, `[elements]`, with the parameters after the push, in the same round trip. If they stay
                with the server, `values` is their memory once the push has ended.
            next_order: None to ask for no order; True to wait for the next order, False to accept `Wait`.

        Returns:
            A handle of the push in progress.
        """
        read = list(self.versions if versions is None else versions)
        parts = tuple(Part(order.step, order.share, order.num_samples, order.batch_samples) for order in orders)
        ids = tuple(order.order_id for order in orders)
        reports = tuple(map(Report, ids, loss_sums)) if loss_sums is not None and len(self._links) == 1 else ()
        into = None if pull_into is None else self._partition.cut(pull_into)
        asked = []
        for shard, link in enumerate(self._links):
            encoding, tensors = self.encoder.encode(shard, gradient, max(order.step for order in orders))
            push = Push(
                origin=Origin(self.worker, parts, read[shard]),
                encoding=encoding,
                pieces=len(tensors),
                unused=tuple(unused),
                orders=() if shard else ids,
            )
            request = Request(
                push=push,
                tally=None if shard or loss_sums is None else self._tally(),
                acknowledge=reports,
                next=self._asking(next_order, without=ids) if reports and next_order is not None else None,
                pull=None if into is None else Pull(reads=self._reads_version, since=self._since(shard)),
            )
            tensors += _beside(None if shard else buffers, measured[shard] if measured else NO_CHANGE.floats)
            whole = into is not None and self._since(shard) is None
            asked.append(link.ask(request, tensors, into=self._targets(shard, into) if into and whole else None))
        return PushHandle(self, asked, ids, loss_sums, read[0], next_order, pulls=into is not None)

    def acknowledge(self, reports: Sequence[Report], next_order: bool | None = None) -> Answer:
        """Report shares to the lead that all shards have applied; return its answer.

        Args:
            reports: report on each share.
            next_order: same as for `start_push`.
        """
        asking = None if next_order is None else self._asking(next_order)
        return self._ask_lead(Request(acknowledge=tuple(reports), tally=self._tally(), next=asking))

    # -- servers that are replaced -------------------------------------------------------------------------------------

    def reconnect(self, shard: int, channel: Channel) -> None:
        """Continue a shard over a channel to its new server, which is sent again what the old one did not answer."""
        self._links[shard].reconnect(channel)
        self._num_told = 0  # the old one may not have passed them on; the recorder drops repeated ones

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent to all servers, including lost ones."""
        return sum(link.bytes_sent for link in self._links)

    @property
    def bytes_moved(self) -> int:
        """Number of bytes sent to all servers and received from them."""
        return sum(link.bytes_moved for link in self._links)

    def close(self) -> None:
        """End the connections; the lead then removes the worker."""
        for link in self._links:
            link.close()

    def _tally(self) -> Traffic | None:
        """Return the traffic section of a request to the lead; None if nothing is new."""
        moved = self.others_bytes + sum([link.bytes_moved for link in self._links[1:]])
        saved = self.others_saved + self.encoder.bytes_saved
        new_bytes, new_saved = max(0, moved - self._bytes_reported), saved - self._saved_reported
        self._bytes_reported, self._saved_reported = moved, saved
        errors: tuple[tuple[int, float], ...] = ()
        if self.encoder.has_news:
            self.encoder.has_news = False
            errors = ((self.worker, math.hypot(self.encoder.error, *self.others_errors)),)
        warnings, self._num_told = tuple(self._warnings[self._num_told :]), len(self._warnings)
        traffic = Traffic(new_bytes, new_saved, errors, warnings)
        return None if traffic == Traffic() else traffic

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _ask_lead(self, request: Request, ends: Sequence[int] = ()) -> Answer:
        """Send a request to the lead and wait for the answer; then the worker no longer holds the orders `ends`."""
        (answer,) = self._all([self._links[0].ask(request)])
        self._drop(ends)
        return answer

    def _all(self, asked: Sequence[Asked]) -> list[Answer]:
        with self._waiting():
            return [one.wait() for one in asked]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the seconds inside, each once even if nested."""
        if self._is_waiting:
            yield
            return
        began_s, self._is_waiting = self._clock(), True
        try:
            with PULSE.waiting():
                yield
        finally:
            self.waited_s += self._clock() - began_s
            self._is_waiting = False

    def _wait_for_another(self, replace: Callable[[int, Exception], Channel], shard: int, error: Exception) -> Channel:
        with self._waiting():
            return replace(shard, error)

    def _asking(self, wait: bool, without: Sequence[int] = (), *, more: int = 0) -> Asking:
        return Asking(tuple(held for held in self.holding if held not in without), wait, more)

    def _received(self, order: Order | None) -> Order:
        assert order is not None
        if isinstance(order, Compute | Validate | Save | Deposit):
            self.holding.append(order.order_id)
        return order

    def _drop(self, ids: Sequence[int]) -> None:
        self.holding = [held for held in self.holding if held not in ids]

    def _since(self, shard: int) -> int | None:
        """Return the version since which changes of a shard's parameters are enough; None: all are needed."""
        return self.versions[shard] if self.pulls_changes and self._holds_all else None

    def _adopt(self, shard: int, asked: Asked) -> None:
        """Make `values` the tensor in which the answer's parameters are, unless they went to other memory."""
        if not asked.tensors:
            return
        assert asked.answer is not None
        if asked.request.pull is not None and asked.request.pull.since is not None:
            self._take_changes(shard, asked.answer.is_sparse, asked.tensors)
            return
        if shard:
            return
        if asked.answer.found is not None:
            self.values, self._reads_version = asked.tensors[0], asked.answer.version
        elif asked.tensors[0].data_ptr() == self.home.data_ptr():
            self.values = self.home

    def _take_changes(self, shard: int, is_sparse: bool, tensors: Sequence[Tensor]) -> None:
        """Take up the values that have changed, or all values, and buffers."""
        values, *buffers = self._targets(shard, self._parts)
        if is_sparse:
            places, changed, *new = tensors
            values.index_copy_(0, places.long(), changed)
        else:
            whole, *new = tensors
            values.copy_(whole)
        for target, tensor in zip(buffers, new, strict=True):
            target.copy_(tensor)

    def _targets(self, shard: int, parts: Sequence[Tensor]) -> list[Tensor]:
        if shard or self.buffers is None:
            return [parts[shard]]
        return [parts[shard], self.buffers.floats, self.buffers.integers]


def _beside(buffers: BufferPush | None, measured: Tensor) -> list[Tensor]:
    """Return what follows a gradient: the changes of buffers, and what was measured, if there is any of both."""
    if buffers is None and not measured.numel():
        return []
    change = buffers or NO_CHANGE
    return [torch.cat([change.floats, measured]) if measured.numel() else change.floats, change.integers]
