"""A leaf server's connection to the shards: reports of several workers in one message of their leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.messages import Asked, Link
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import (
    Answer,
    AskingOf,
    Change,
    Entry,
    Origin,
    Part,
    Pull,
    Push,
    ReportOf,
    Request,
    Snapshot,
    Traffic,
)
from orchestray.trainers.ps.variants.hierarchy.root_server import number_of_leaf
from orchestray.trainers.ps.variants.hierarchy.significance_filter import pack, unpack


@dataclass(frozen=True)
class Collected:
    """A push of a worker that its leaf has not passed on."""

    worker: int
    orders: tuple[int, ...]
    loss_sums: tuple[float, ...]
    parts: tuple[Part, ...]
    read_version: int
    gradient: Tensor
    """Gradient of all parameters, `[elements]`."""
    unused: frozenset[str]
    buffers: BufferPush | None


class Upstream:
    """A client of the shards; every method but `ask_orders` waits for the answers. Used by one thread.

    Attributes:
        links: connections to the shards, in order; the first is the lead.
        values: all parameters as received from the shards, `[elements]`.
        versions: version of each shard's values.
        buffer_values: the model's buffers as received from the lead; empty if it has none.
        num_pushes: number of messages of gradients or changes to the lead.
        bytes_dense: bytes of values both ways, had all values been sent each time.
    """

    def __init__(
        self,
        leaf: int,
        channels: Sequence[Channel],
        partition: Partition,
        like: Tensor,
        *,
        replace: Callable[[int, Exception], Channel] | None = None,
    ) -> None:
        """
        Args:
            leaf: number of this leaf.
            channels: channels to the shards, in order.
            partition: partition of the parameters.
            like: tensor with the shape, dtype and device of all parameters.
            replace: see `ShardClient`.
        """
        self.number = number_of_leaf(leaf)
        self.links = [Link(shard, channel, self.number, replace=replace) for shard, channel in enumerate(channels)]
        self.partition = partition
        self.values = torch.zeros_like(like)
        self.versions = [0] * len(self.links)
        self.buffer_values: list[Tensor] = []
        self.num_pushes = 0
        self.bytes_dense = 0
        self._num_changes = 0
        self._bytes_reported = 0
        """Bytes to and from the other shards, as far as the lead has been sent them."""
        self._dense_bytes = like.numel() * like.element_size()

    def run_report(self) -> dict[str, int]:
        """Return the number of `pushes` of this leaf; empty before the first one."""
        return {"pushes": self.num_pushes} if self.num_pushes else {}

    def hello(self) -> None:
        """Introduce this leaf to all shards, and take their present parameters."""
        self._wait([link.ask(link.hello(is_new=True)) for link in self.links])
        self.pull(0)

    def relay(self, report: Entry) -> Answer:
        """Pass a worker's report on to the lead; return its answer."""
        return self._wait([self.links[0].ask(Request(relay=(report,)))])[0].relayed[0]

    def ask_orders(self, acknowledged: Sequence[ReportOf], asks: Sequence[AskingOf], tally: Traffic) -> Asked:
        """Report shares that all shards have applied (except those of `change`), and request orders; see `root_server`.

        Args:
            acknowledged: reports of the workers.
            asks: requests of the workers.
            tally: traffic of this leaf's connections to them.
        """
        moved = sum(link.bytes_moved for link in self.links[1:])
        traffic = with_fields(tally, bytes=tally.bytes + max(0, moved - self._bytes_reported))
        self._bytes_reported = moved
        return self.links[0].ask(Request(asks=tuple(asks), tally=traffic, acknowledge_for=tuple(acknowledged)))

    def push_sum(self, collected: Sequence[Collected]) -> list[Answer]:
        """Send the sum of shares of one batch to all shards; return their answers."""
        total = collected[0].gradient
        if len(collected) > 1:
            total = total + collected[1].gradient
            for one in collected[2:]:
                total += one.gradient
        parts = tuple(part for one in collected for part in one.parts)
        unused = frozenset.intersection(*(one.unused for one in collected))
        buffers = [one.buffers for one in collected if one.buffers is not None]
        origin = Origin(self.number, parts, min(one.read_version for one in collected))
        push = Push(origin=origin, unused=tuple(sorted(unused)))
        asked = []
        for shard, part in enumerate(self.partition.cut(total)):
            request, tensors = Request(push=push), [part]
            if shard == 0:
                orders = tuple(order for one in collected for order in one.orders)
                workers = tuple(one.worker for one in collected for _ in one.orders)
                request = Request(push=with_fields(push, orders=orders, workers=workers))
                if buffers:
                    added = sum(buffers[1:], start=buffers[0])
                    tensors += [added.floats, added.integers]
            asked.append(self.links[shard].ask(request, tensors))
        self.num_pushes += 1
        self.bytes_dense += self._dense_bytes
        return self._wait(asked)

    def pull(self, min_version: int) -> None:
        """Pull all values into new memory; the earlier tensors do not change."""
        values = torch.empty_like(self.values)
        asked = [link.ask(Request(pull=Pull(min_version))) for link in self.links]
        self.versions = [answer.version for answer in self._wait(asked)]
        torch.cat([one.tensors[0] for one in asked], out=values)
        self.values, self.buffer_values = values, list(asked[0].tensors[1:])
        self.bytes_dense += self._dense_bytes

    @torch.no_grad()
    def change(
        self,
        places: Tensor,
        change: Tensor,
        buffers: BufferPush | None,
        *,
        owes: bool,
        acknowledged: Sequence[ReportOf] = (),
    ) -> Sequence[bool]:
        """Send the change that this leaf has made to the parameters, and take what is new.

        Args:
            places: indices of the changed elements, int64, ascending.
            change: change at each place.
            buffers: changes that its workers made to the model's buffers.
            owes: True if a part of the change is kept back.
            acknowledged: reports of the shares that this change completes, as for `ask_orders`.

        Returns:
            For each of these True if it counts.
        """
        self._num_changes += 1
        header = Change(self._num_changes, owes)
        cut = []
        for first, last in self.partition.bounds:
            begin, end = torch.searchsorted(places, torch.tensor([first, last])).tolist()
            cut.append(pack(places[begin:end] - first, change[begin:end], last - first))
        if buffers is not None:
            cut[0] += [buffers.floats, buffers.integers]
        requests = [Request(change=header, refresh=version) for version in self.versions]
        # The lead comes last: once it has the change, the shares are done even if this process dies.
        others = [
            link.ask(request, tensors)
            for link, request, tensors in zip(self.links[1:], requests[1:], cut[1:], strict=True)
        ]
        answers = self._wait(others)
        lead = self.links[0].ask(with_fields(requests[0], acknowledge_for=tuple(acknowledged)), cut[0])
        answers = [lead.wait(), *answers]
        self.num_pushes += 1
        self.bytes_dense += 2 * self._dense_bytes
        self.values.index_add_(0, places, change)
        self._take_news([lead, *others], answers)
        return answers[0].counts_for

    def refresh(self) -> None:
        """Take what is new."""
        asked = [link.ask(Request(refresh=version)) for link, version in zip(self.links, self.versions, strict=True)]
        self.bytes_dense += self._dense_bytes
        self._take_news(asked, self._wait(asked))

    def snapshots(self, step: int | None) -> tuple[list[dict[str, Tensor]], str | None]:
        """Return every shard's snapshot (see `ShardServer.snapshot`), and the lead's state of the run."""
        asked = [link.ask(Request(snapshot=Snapshot(step))) for link in self.links]
        answers = self._wait(asked)
        found = [dict(zip(a.names, one.tensors, strict=True)) for a, one in zip(answers, asked, strict=True)]
        return found, answers[0].run_state

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self.links)

    @property
    def bytes_moved(self) -> int:
        """Number of bytes sent and received."""
        return sum(link.bytes_moved for link in self.links)

    def close(self) -> None:
        for link in self.links:
            link.close()

    @torch.no_grad()
    def _take_news(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        for shard, (one, (first, last)) in enumerate(zip(asked, self.partition.bounds, strict=True)):
            tensors = list(one.tensors)
            if shard == 0 and self.buffer_values:
                self.buffer_values, tensors = tensors[-2:], tensors[:-2]
            places, values = unpack(tensors)
            part = self.values[first:last]
            if places is None:
                part.copy_(values)
            else:
                part.index_copy_(0, places, values)
            self.versions[shard] = answers[shard].version

    @staticmethod
    def _wait(asked: Sequence[Asked]) -> list[Answer]:
        return [one.wait() for one in asked]
