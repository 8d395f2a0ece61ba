"""A leaf server's end of the shards: what several workers say, in one message of their leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.channel.base import Channel
from orchestray.trainers.central.applied import Part
from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.link import Asked, Link
from orchestray.trainers.central.messages import DENSE
from orchestray.trainers.central.partition import Partition
from orchestray.trainers.central.root import number_of_leaf
from orchestray.trainers.central.significance import pack, unpack


@dataclass(frozen=True)
class Collected:
    """What a worker pushed, and its leaf has not passed on."""

    worker: int
    orders: tuple[int, ...]
    loss_sums: tuple[float, ...]
    parts: tuple[Part, ...]
    read_version: int
    gradient: Tensor
    """`[elements]`, of all parameters."""
    unused: frozenset[str]
    buffers: BufferPush | None


class Upstream:
    """Requests to the shards; every method but `ask_orders` waits for the answers. Used by one thread.

    Attributes:
        links: to the shards, in order; the first is the lead.
        values: all parameters as the shards have told them, `[elements]`.
        versions: of each shard's.
        buffer_values: of the model's buffers, as the lead told them; empty: it has none.
        num_pushes: messages of gradients or changes to the lead.
        bytes_dense: of values both ways, had all of them been sent each time.
    """

    def __init__(
        self,
        leaf: int,
        channels: Sequence[Channel],
        partition: Partition,
        like: Tensor,
        *,
        incarnation: int = 0,
        replace: Callable[[int, Exception], Channel] | None = None,
    ) -> None:
        """
        Args:
            leaf: number of this leaf.
            channels: to the shards, in order.
            partition: of the parameters.
            like: a tensor with the shape, dtype and device of all parameters.
            incarnation: which process of this leaf: a later one has another.
            replace: see `ShardClient`.
        """
        self.number = number_of_leaf(leaf)
        self.links = [
            Link(shard, channel, {"worker": self.number, "incarnation": incarnation}, replace=replace)
            for shard, channel in enumerate(channels)
        ]
        self.partition = partition
        self.values = torch.zeros_like(like)
        self.versions = [0] * len(self.links)
        self.buffer_values: list[Tensor] = []
        self.num_pushes = 0
        self.bytes_dense = 0
        self._incarnation = incarnation
        self._num_changes = 0
        self._bytes_told = 0
        """Of those that went to and from the other shards, the lead knows of so many."""
        self._dense_bytes = like.numel() * like.element_size()

    def hello(self) -> None:
        """Tell all shards who this is, and take the parameters as they are."""
        lead, *others = self.links
        unsettled = lead.ask(lead.hello(anew=True)).wait()["unsettled"]
        self._wait([link.ask({**link.hello(anew=True), "settle": unsettled}) for link in others])
        lead.ask({"settled": unsettled}).wait()
        self.pull(0)

    def settle(self, unsettled: Sequence[Sequence[int]]) -> None:
        """Have the shards take back what lost leaves have told some of them and not the lead; see `root`."""
        self._wait([link.ask({"settle": list(unsettled)}) for link in self.links[1:]])
        self.links[0].ask({"settled": list(unsettled)}).wait()

    def relay(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Pass on what workers say to the lead; returns what it says to each."""
        answer = self._wait([self.links[0].ask({"relay": list(told)})])[0]
        return list(answer["relayed"])

    def ask_orders(
        self, acknowledged: Sequence[Sequence[Any]], asks: Sequence[Sequence[Any]], tally: Mapping[str, Any]
    ) -> Asked:
        """Report shares that all shards have taken in (but by `change`), and ask what workers shall do; see `root`.

        Args:
            acknowledged, asks: of the workers.
            tally: of this leaf's connections to them.
        """
        moved = sum(link.bytes_moved for link in self.links[1:])
        told = {**tally, "bytes": tally["bytes"] + max(0, moved - self._bytes_told)}
        self._bytes_told = moved
        request: dict[str, Any] = {"asks": list(asks), "tally": told}
        if acknowledged:
            request["acknowledge_for"] = list(acknowledged)
        return self.links[0].ask(request)

    def push_sum(self, collected: Sequence[Collected]) -> list[Mapping[str, Any]]:
        """Send the sum of shares of one batch to all shards; returns their answers."""
        total = collected[0].gradient
        if len(collected) > 1:
            total = total + collected[1].gradient
            for one in collected[2:]:
                total += one.gradient
        parts = [part.to_json() for one in collected for part in one.parts]
        unused = frozenset.intersection(*(one.unused for one in collected))
        buffers = [one.buffers for one in collected if one.buffers is not None]
        push: dict[str, Any] = {
            "origin": [self.number, parts, min(one.read_version for one in collected)],
            "unused": sorted(unused),
            "encoding": DENSE,
            "pieces": 1,
        }
        asked = []
        for shard, part in enumerate(self.partition.cut(total)):
            request, tensors = {"push": push}, [part]
            if shard == 0:
                orders = [order for one in collected for order in one.orders]
                workers = [one.worker for one in collected for _ in one.orders]
                request = {"push": {**push, "orders": orders, "workers": workers}}
                if buffers:
                    added = sum(buffers[1:], start=buffers[0])
                    tensors += [added.floats, added.integers]
            asked.append(self.links[shard].ask(request, tensors))
        self.num_pushes += 1
        self.bytes_dense += self._dense_bytes
        return self._wait(asked)

    def pull(self, min_version: int) -> None:
        """Take all values, in new memory: the tensors of before stay as they were."""
        values = torch.empty_like(self.values)
        pull = {"min_version": min_version, "newer_than": None}
        asked = [link.ask({"pull": pull}) for link in self.links]
        self.versions = [int(answer["version"]) for answer in self._wait(asked)]
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
        acknowledged: Sequence[Sequence[Any]] = (),
    ) -> list[bool]:
        """Send how this leaf has moved the parameters, and take what is new.

        Args:
            places: int64, ascending.
            change: at each place.
            buffers: what its workers did to the model's buffers.
            owes: whether something is kept back.
            acknowledged: the shares of workers that are done with this change, as `ask_orders` takes them.

        Returns:
            Of each of these whether it counts.
        """
        self._num_changes += 1
        told = [self._incarnation, self._num_changes, owes]
        cut = []
        for first, last in self.partition.bounds:
            begin, end = torch.searchsorted(places, torch.tensor([first, last])).tolist()
            cut.append(pack(places[begin:end] - first, change[begin:end], last - first))
        if buffers is not None:
            cut[0] += [buffers.floats, buffers.integers]
        requests = [{"change": told, "refresh": version} for version in self.versions]
        # The lead comes last: with what it has taken in, the shares are done, wherever this process ends.
        others = [
            link.ask(request, tensors)
            for link, request, tensors in zip(self.links[1:], requests[1:], cut[1:], strict=True)
        ]
        answers = self._wait(others)
        lead = self.links[0].ask({**requests[0], "acknowledge_for": list(acknowledged)}, cut[0])
        answers = [lead.wait(), *answers]
        self.num_pushes += 1
        self.bytes_dense += 2 * self._dense_bytes
        self.values.index_add_(0, places, change)
        self._take_news([lead, *others], answers)
        return list(answers[0]["counts"])

    def refresh(self) -> None:
        """Take what is new."""
        asked = [link.ask({"refresh": version}) for link, version in zip(self.links, self.versions, strict=True)]
        self.bytes_dense += self._dense_bytes
        self._take_news(asked, self._wait(asked))

    def snapshots(self, step: int | None) -> tuple[list[dict[str, Tensor]], Any]:
        """As `ShardClient.snapshot`, and what the lead says of the run."""
        asked = [link.ask({"snapshot": step}) for link in self.links]
        answers = self._wait(asked)
        found = [dict(zip(a["names"], one.tensors, strict=True)) for a, one in zip(answers, asked, strict=True)]
        return found, answers[0]["told"]

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self.links)

    @property
    def bytes_moved(self) -> int:
        """Both ways."""
        return sum(link.bytes_moved for link in self.links)

    def close(self) -> None:
        for link in self.links:
            link.close()

    @torch.no_grad()
    def _take_news(self, asked: Sequence[Asked], answers: Sequence[Mapping[str, Any]]) -> None:
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
            self.versions[shard] = int(answers[shard]["version"])

    @staticmethod
    def _wait(asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
        return [one.wait() for one in asked]
