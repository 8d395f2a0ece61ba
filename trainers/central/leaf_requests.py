"""What becomes of the requests that a leaf server's workers make: gradients are collected and sent on, orders fetched.

Used by one thread, but for what says otherwise.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestray.platform.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.central.leaf_copies import BatchCopy, LocalCopy
from orchestray.trainers.central.link import Asked
from orchestray.trainers.central.messages import ServerError
from orchestray.trainers.central.orders import Wait, order_to_json
from orchestray.trainers.central.pushed import Decode, snapshot_of
from orchestray.trainers.central.tally import Tally
from orchestray.trainers.central.upstream import Collected, Upstream

_WAIT = order_to_json(Wait())
_RELAYED = ("hello", "validated", "saved", "acknowledge")


@dataclass(eq=False)
class Asker:
    """A request of a worker under way."""

    worker: int
    request: Mapping[str, Any]
    tensors: list[Tensor]
    channel: Channel
    answer: dict[str, Any] = field(default_factory=dict)
    reply: list[Tensor] = field(default_factory=list)
    lent: bool = False
    waits: bool = False
    """For an order."""
    is_told: bool = False
    """Whether the lead has said that there is nothing for it for now."""
    is_done: bool = False
    is_gone: bool = False
    """Whether nobody waits for the answer any more: what would be lent for it would not come back."""


@dataclass(frozen=True)
class _Flight:
    """A request for orders under way."""

    asked: Asked
    acknowledged: list[tuple[Asker, Sequence[Any]]]
    askers: list[Asker]
    waits: bool
    """Whether the lead answers once it has an order, not at once."""


class Requests:
    """Of all workers of a leaf; see `leaf.LeafServer`."""

    def __init__(
        self,
        upstream: Upstream,
        copy: BatchCopy | LocalCopy,
        decode: Decode,
        changed: threading.Condition,
        *,
        sums_whole_batches: bool,
    ) -> None:
        """
        Args:
            upstream, copy, decode, sums_whole_batches: as of `LeafServer`.
            changed: notified when a request is done with.
        """
        self._upstream, self._copy, self._decode, self._changed = upstream, copy, decode, changed
        self._sums_whole_batches = sums_whole_batches
        self._connected: dict[int, Channel] = {}
        self._waiting: list[Asker] = []
        """For orders."""
        self._pushed: dict[int, list[tuple[Asker, Collected]]] = {}
        """Of each worker, what is kept back until its batch is sent."""
        self._acknowledging: list[tuple[Asker, Sequence[Any]]] = []
        self._out: dict[int, tuple[int, int]] = {}
        """Shares that are being computed: worker and step, by order."""
        self._flights: deque[_Flight] = deque()
        self._tally = Tally()

    @property
    def answer_header(self) -> Handle[Message] | None:
        """Of the oldest request for orders that is under way: done when there is something for `land`."""
        return self._flights[0].asked.header if self._flights else None

    @property
    def has_landed(self) -> bool:
        """Whether `land` has something to do. From any thread."""
        return bool(self._flights) and self._flights[0].asked.done()

    def take(self, asker: Asker) -> None:
        """Begin with a request."""
        request = asker.request
        try:
            if "tally" in request:
                self._tally.add(request["tally"])
            if "hello" in request:
                self._forget(asker.worker)
                self._connected[asker.worker] = asker.channel
                self._tally.open(asker.channel)
            if "push" in request:
                self._collect(asker)
                return
            told = {name: request[name] for name in _RELAYED if name in request}
            if told:
                asker.answer |= self._upstream.relay([{**told, "worker": asker.worker}])[0]
        except ChannelClosedError:
            raise
        except OrchestrayError as error:
            self._fail(asker, error)
            return
        self._order(asker)

    def _order(self, asker: Asker) -> None:
        """Go on to the order, once a push of the request is done with."""
        if "next" in asker.request:
            asker.waits = True
            self._waiting.append(asker)
        else:
            self._finish(asker)

    def _finish(self, asker: Asker) -> None:
        """The last: parameters."""
        request = asker.request
        try:
            if "pull" in request:
                self._copy.fetch(int(request["pull"]["min_version"]))
            if "snapshot" in request:
                asker.answer["names"], asker.reply, asker.answer["told"] = snapshot_of(
                    self._upstream, self._copy, request["snapshot"]
                )
        except ChannelClosedError:
            raise
        except OrchestrayError as error:
            self._fail(asker, error)
            return
        with self._changed:
            if "pull" in request:
                version, newer_than = self._copy.version, request["pull"]["newer_than"]
                asker.answer["version"] = version
                if not asker.is_gone and (newer_than is None or version > newer_than):
                    asker.reply, asker.lent = self._copy.lend(), True
            asker.is_done = True
            self._changed.notify_all()

    def _fail(self, asker: Asker, error: OrchestrayError) -> None:
        with self._changed:
            asker.answer, asker.reply, asker.is_done = {"error": str(error)}, [], True
            self._changed.notify_all()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _collect(self, asker: Asker) -> None:
        collected = self._decode(asker.worker, asker.request, asker.tensors)
        asker.tensors = []
        for order in collected.orders:
            self._out.pop(order, None)
        asker.answer |= {"claimed": list(collected.orders), "counts": True, "missing": [], "version": 0}
        copy = self._copy
        if isinstance(copy, BatchCopy):
            copy.add(collected)
            self._pushed.setdefault(asker.worker, []).append((asker, collected))
            return
        done = copy.apply(collected)
        asker.answer |= {"staleness": done.staleness, "version": done.version}
        if done.missing:
            asker.answer |= {"missing": [part.to_json() for part in done.missing], "counts": False}
            self._order(asker)
            return
        self._acknowledge(asker, collected, collected.read_version, done.staleness)

    def _acknowledge(self, asker: Asker, collected: Collected, read: int, staleness: int) -> None:
        for order, loss_sum in zip(collected.orders, collected.loss_sums, strict=True):
            self._acknowledging.append((asker, [asker.worker, order, loss_sum, read, read + staleness]))

    def forward(self) -> None:
        """Send what is due to the shards."""
        copy = self._copy
        if isinstance(copy, LocalCopy):
            if self._acknowledging:
                acknowledged, self._acknowledging = self._acknowledging, []
                counts = copy.send([report for _, report in acknowledged])
                for asker in _count(acknowledged, counts):
                    self._order(asker)
            return
        for step in sorted(copy.waiting):
            if not self._sums_whole_batches or self._is_whole(step):
                collected = copy.take(step)
                try:
                    self._push(collected)
                except ServerError as error:
                    for one in collected:
                        self._fail(self._asker_of(one), error)

    def _is_whole(self, step: int) -> bool:
        """Whether nobody here has a share of a batch still to push, or is about to be given one."""
        if any(of == step for _, of in self._out.values()):
            return False
        known = {worker for worker, _ in self._out.values()} | set(self._pushed)
        known |= {asker.worker for asker in self._waiting if asker.is_told}
        return known >= set(self._connected)

    def _push(self, collected: list[Collected]) -> None:
        answers = self._upstream.push_sum(collected)
        claimed = set(answers[0]["claimed"])
        refused = [one for one in collected if not claimed.issuperset(one.orders)]
        if refused:  # somebody else was first
            for one in refused:
                asker = self._asker_of(one)
                asker.answer |= {"claimed": [], "counts": False, "staleness": 0}
                self._order(asker)
            rest = [one for one in collected if one not in refused]
            if rest:
                self._push(rest)
            return
        if any(answer["missing"] for answer in answers):  # a lost leaf's sum has reached some shards with a part of it
            for one in collected:
                self._upstream.push_sum([one])
        staleness = int(answers[0]["staleness"])
        for one in collected:
            asker = self._asker_of(one)
            asker.answer["staleness"] = staleness
            self._acknowledge(asker, one, one.read_version, staleness)

    def _asker_of(self, collected: Collected) -> Asker:
        pushed = self._pushed[collected.worker]
        index = next(i for i, (_, one) in enumerate(pushed) if one is collected)
        asker, _ = pushed.pop(index)
        if not pushed:
            del self._pushed[collected.worker]
        return asker

    # -- orders ------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Report what is done, and ask for orders where somebody asks who has not before."""
        acknowledged, self._acknowledging = self._acknowledging, []
        pushers = dict.fromkeys(asker for asker, _ in acknowledged)
        for asker in pushers:
            if "next" in asker.request:
                self._order(asker)
        if not (acknowledged or self._is_to_ask()):
            return
        # A push that waits for the rest of its batch, and one whose worker wants no order, wait for the answer.
        waits = not self._pushed and all("next" in asker.request for asker in pushers)
        asks = []
        for asker in self._waiting:
            asked = asker.request["next"]
            asks.append([asker.worker, asked["holding"], bool(asked["wait"]) and waits])
        reports = [report for _, report in acknowledged]
        sent = self._upstream.ask_orders(acknowledged=reports, asks=asks, tally=self._tally.take())
        self._flights.append(_Flight(sent, acknowledged, list(self._waiting), waits))

    def _is_to_ask(self) -> bool:
        """Whether the lead must be asked, since what is under way will not do."""
        last = self._flights[-1] if self._flights else None
        if last is None:
            return any(not self._pushed or not asker.is_told for asker in self._waiting)
        if any(asker not in last.askers for asker in self._waiting):
            return True
        return last.waits and bool(self._pushed) and not all(asker.is_told for asker in self._waiting)

    def land(self) -> None:
        """Take in the answers of the lead that are there."""
        while self.has_landed:
            flight = self._flights[0]
            if flight.asked.answer is None:
                flight.asked.link.finish_first()
            if flight.asked.answer is None:  # its server was lost: it is under way to another
                return
            self._flights.popleft()
            try:
                answer = flight.asked.wait()
            except OrchestrayError as error:
                for asker in dict.fromkeys([*(one for one, _ in flight.acknowledged), *flight.askers]):
                    asker.waits = False
                    self._fail(asker, error)
                self._waiting = [asker for asker in self._waiting if asker.waits]
                continue
            self._on_orders(flight, answer)

    def _on_orders(self, flight: _Flight, answer: Mapping[str, Any]) -> None:
        if flight.acknowledged:
            for asker in _count(flight.acknowledged, answer["counts"]):
                if "next" not in asker.request:
                    self._finish(asker)
        if answer["unsettled"]:
            self._upstream.settle(answer["unsettled"])
        if answer["flush"] and isinstance(self._copy, LocalCopy):
            self._copy.send(everything=True)
        given = []
        for asker, order in zip(flight.askers, answer["orders"], strict=True):
            if not asker.waits:
                continue  # it has one, or is gone
            asker.is_told = bool(asker.request["next"]["wait"]) and order in (None, _WAIT)
            if not asker.is_told:
                given.append((asker, order or _WAIT))
        if given:
            self._fetch_for([order for _, order in given])
        for asker, order in given:
            asker.waits = False
            self._waiting.remove(asker)
            asker.answer["order"] = order
            if order["kind"] == "compute":
                self._out[order["order_id"]] = (asker.worker, order["step"])
            self._finish(asker)

    def _fetch_for(self, orders: Sequence[Mapping[str, Any]]) -> None:
        """Have the parameters that orders need before anybody asks for them."""
        if isinstance(self._copy, BatchCopy):
            self._copy.prepare(max(order.get("min_version", 0) for order in orders))
        elif any(order["kind"] not in ("compute", "wait") for order in orders):
            self._copy.fetch()

    # -- workers that are lost ---------------------------------------------------------------------------------------

    def lose(self, worker: int, channel: Channel) -> None:
        """A worker's channel has ended; that it came back over another one counts."""
        self._tally.end(channel)
        if self._connected.get(worker) is not channel:
            return
        self._forget(worker)
        del self._connected[worker]
        self._upstream.relay([{"worker": worker, "leave": True}])
        if not self._connected and isinstance(self._copy, LocalCopy):
            self._copy.send(everything=True)

    def _forget(self, worker: int) -> None:
        """What a worker had is not its own any more; what this leaf's parameters hold of it is done, first."""
        if isinstance(self._copy, LocalCopy):
            self.forward()
            self.ask()
        else:
            self._copy.drop(worker)
            self._pushed.pop(worker, None)
        self._out = {order: held for order, held in self._out.items() if held[0] != worker}
        for asker in [asker for asker in self._waiting if asker.worker == worker]:
            asker.waits = False
            self._waiting.remove(asker)


def _count(acknowledged: Sequence[tuple[Asker, Sequence[Any]]], counts: Sequence[bool]) -> dict[Asker, None]:
    """Note of each share whether it counts; returns those who pushed them, in order."""
    for (asker, _), one in zip(acknowledged, counts, strict=True):
        asker.answer["counts"] = asker.answer["counts"] and one
    return dict.fromkeys(asker for asker, _ in acknowledged)
