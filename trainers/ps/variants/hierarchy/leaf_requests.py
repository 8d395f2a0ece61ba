"""The requests of a leaf server's workers: their gradients are collected and sent on, and their orders fetched.

Used by one thread, except where a docstring says otherwise.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.comm.flat_tensors import flatten
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.ps.protocol.assignments import Compute, Order, Wait
from orchestray.trainers.ps.protocol.encoding import GradientDecoder
from orchestray.trainers.ps.protocol.messages import Asked, ServerError
from orchestray.trainers.ps.protocol.requests import DENSE, Answer, AskingOf, Entry, Push, Report, ReportOf, Request
from orchestray.trainers.ps.server.events import TrafficCounter
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Collected, Upstream
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import BatchCopy, GroupCopy, LocalCopy, snapshot_of

_RELAYED = ("hello", "validated", "saved", "acknowledge")


@dataclass(eq=False)
class Asker:
    """A worker's request in progress."""

    worker: int
    request: Request
    tensors: list[Tensor]
    channel: Channel
    answer: Answer = field(default_factory=Answer)
    reply: list[Tensor] = field(default_factory=list)
    lent: bool = False
    waits: bool = False
    """True if it waits for an order."""
    is_told: bool = False
    """True if the lead has answered that it has to wait for an order."""
    is_done: bool = False
    is_gone: bool = False
    """True if nothing waits for the answer any more; what would be lent for it would not come back."""


@dataclass(frozen=True)
class _OrderRequest:
    """A request for orders in progress."""

    asked: Asked
    acknowledged: list[tuple[Asker, ReportOf]]
    askers: list[Asker]
    waits: bool
    """True if the lead answers only once it has an order."""


class Requests:
    """The requests of all workers of a leaf; see `leaf.LeafServer`."""

    def __init__(
        self,
        upstream: Upstream,
        copy: BatchCopy | LocalCopy,
        decoder: GradientDecoder,
        changed: threading.Condition,
        *,
        sums_whole_batches: bool,
    ) -> None:
        """
        Args:
            upstream: same as in `LeafServer`.
            copy: same as in `LeafServer`.
            decoder: same as in `LeafServer`.
            changed: notified when a request has been completed.
            sums_whole_batches: same as in `LeafServer`.
        """
        self._upstream, self._copy, self._decoder, self._changed = upstream, copy, decoder, changed
        self._sums_whole_batches = sums_whole_batches
        self._connected: dict[int, Channel] = {}
        self._waiting: list[Asker] = []
        """Requests that wait for orders."""
        self._pushed: dict[int, list[tuple[Asker, Collected]]] = {}
        """Pushes of each worker that are kept back until their batch is sent."""
        self._acknowledging: list[tuple[Asker, ReportOf]] = []
        self._out: dict[int, tuple[int, int]] = {}
        """Worker and step of each share that is being computed, by order."""
        self._in_flight: deque[_OrderRequest] = deque()
        self._tally = TrafficCounter()

    @property
    def answer_header(self) -> Handle[Message] | None:
        """Header of the answer to the oldest request for orders in progress; done when `land` has something to do."""
        return self._in_flight[0].asked.header if self._in_flight else None

    @property
    def has_landed(self) -> bool:
        """True if `land` has something to do. For any thread."""
        return bool(self._in_flight) and self._in_flight[0].asked.done()

    def take(self, asker: Asker) -> None:
        """Begin with a request."""
        request = asker.request
        try:
            if request.tally is not None:
                self._tally.add(request.tally)
            if request.hello is not None:
                self._forget(asker.worker)
                self._connected[asker.worker] = asker.channel
                self._tally.open(asker.channel)
            if request.push is not None:
                self._collect(asker, request.push)
                return
            reports = {name: section for name, section in request.changes.items() if name in _RELAYED}
            if reports:
                asker.answer = self._upstream.relay(Entry(worker=asker.worker, **reports))
        except ChannelClosedError:
            raise
        except OrchestrayError as error:
            self._fail(asker, error)
            return
        self._order(asker)

    def _order(self, asker: Asker) -> None:
        """Go on to the order, after a push of the request."""
        if asker.request.next is not None:
            asker.waits = True
            self._waiting.append(asker)
        else:
            self._finish(asker)

    def _finish(self, asker: Asker) -> None:
        """Complete a request with its last section: parameters."""
        request = asker.request
        try:
            if request.pull is not None:
                self._copy.fetch(request.pull.min_version)
            if request.snapshot is not None:
                asker.answer.names, asker.reply, asker.answer.run_state = snapshot_of(
                    self._upstream, self._copy, request.snapshot.step
                )
        except ChannelClosedError:
            raise
        except OrchestrayError as error:
            self._fail(asker, error)
            return
        with self._changed:
            if request.pull is not None:
                version, newer_than = self._copy.version, request.pull.newer_than
                asker.answer.version = version
                if not asker.is_gone and (newer_than is None or version > newer_than):
                    asker.reply, asker.lent = self._copy.lend(), True
            asker.is_done = True
            self._changed.notify_all()

    def _fail(self, asker: Asker, error: OrchestrayError) -> None:
        with self._changed:
            asker.answer, asker.reply, asker.is_done = Answer(error=str(error)), [], True
            self._changed.notify_all()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _collect(self, asker: Asker, push: Push) -> None:
        tensors, asker.tensors = asker.tensors, []
        if push.encoding == DENSE and push.pieces > 1:
            tensors = [flatten(tensors[: push.pieces]), *tensors[push.pieces :]]
        gradient, buffers = self._decoder.decode(push.encoding, tensors)
        collected = Collected(
            worker=asker.worker,
            orders=push.orders,
            loss_sums=tuple(report.loss_sum for report in asker.request.acknowledge),
            parts=push.origin.parts,
            read_version=push.origin.read_version,
            gradient=gradient,
            unused=frozenset(push.unused),
            buffers=buffers,
        )
        for order in collected.orders:
            self._out.pop(order, None)
        answer = asker.answer
        answer.claimed, answer.counts = collected.orders, True
        copy = self._copy
        if isinstance(copy, BatchCopy):
            copy.add(collected)
            self._pushed.setdefault(asker.worker, []).append((asker, collected))
            return
        done = copy.apply(collected)
        answer.staleness, answer.version = done.staleness, done.version
        if done.missing:
            answer.missing, answer.counts = done.missing, False
            self._order(asker)
            return
        self._acknowledge(asker, collected, collected.read_version, done.staleness)

    def _acknowledge(self, asker: Asker, collected: Collected, read: int, staleness: int) -> None:
        for order, loss_sum in zip(collected.orders, collected.loss_sums, strict=True):
            report = Report(order, loss_sum, read, read + staleness)
            self._acknowledging.append((asker, ReportOf(asker.worker, report)))

    def forward(self) -> None:
        """Send to the shards what is due."""
        copy = self._copy
        if isinstance(copy, LocalCopy):
            if self._acknowledging:
                acknowledged, self._acknowledging = self._acknowledging, []
                counts = copy.send([report for _, report in acknowledged])
                for asker in _count(acknowledged, counts):
                    self._order(asker)
            return
        for number in sorted(copy.waiting):
            if not self._sums_whole_batches or self._is_whole(copy, number):
                collected = copy.take(number)
                try:
                    self._push(collected)
                except ServerError as error:
                    for one in collected:
                        self._fail(self._asker_of(one), error)

    def _is_whole(self, copy: BatchCopy, number: int) -> bool:
        """Return True if no worker here has a share of the push still to send, or is about to be given one."""
        if any(copy.round_of(step) == number for _, step in self._out.values()):
            return False
        known = {worker for worker, _ in self._out.values()} | set(self._pushed)
        known |= {asker.worker for asker in self._waiting if asker.is_told}
        return known >= set(self._connected)

    def _push(self, collected: list[Collected]) -> None:
        answers = self._upstream.push_sum(collected)
        claimed = set(answers[0].claimed)
        refused = [one for one in collected if not claimed.issuperset(one.orders)]
        if refused:  # another worker was first
            for one in refused:
                asker = self._asker_of(one)
                asker.answer.claimed, asker.answer.counts, asker.answer.staleness = (), False, 0
                self._order(asker)
            rest = [one for one in collected if one not in refused]
            if rest:
                self._push(rest)
            return
        if any(answer.missing for answer in answers):  # a lost leaf's sum has reached some shards with a part of it
            for one in collected:
                self._upstream.push_sum([one])
        staleness = answers[0].staleness
        for one in collected:
            asker = self._asker_of(one)
            asker.answer.staleness = staleness
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
        """Report what is done, and request orders if a worker asks that has not asked before."""
        acknowledged, self._acknowledging = self._acknowledging, []
        pushers = dict.fromkeys(asker for asker, _ in acknowledged)
        for asker in pushers:
            if asker.request.next is not None:
                self._order(asker)
        if not (acknowledged or self._is_to_ask()):
            return
        # A push that waits for the rest of its batch, and one whose worker wants no order, wait for the answer.
        waits = not self._pushed and all(asker.request.next is not None for asker in pushers)
        asks = []
        for asker in self._waiting:
            assert asker.request.next is not None
            asks.append(AskingOf(asker.worker, replace(asker.request.next, wait=asker.request.next.wait and waits)))
        reports = [report for _, report in acknowledged]
        sent = self._upstream.ask_orders(acknowledged=reports, asks=asks, tally=self._tally.take())
        self._in_flight.append(_OrderRequest(sent, acknowledged, list(self._waiting), waits))

    def _is_to_ask(self) -> bool:
        """Return True if the lead must be asked, because the requests in progress are not enough."""
        last = self._in_flight[-1] if self._in_flight else None
        if last is None:
            return any(not self._pushed or not asker.is_told for asker in self._waiting)
        if any(asker not in last.askers for asker in self._waiting):
            return True
        return last.waits and bool(self._pushed) and not all(asker.is_told for asker in self._waiting)

    def land(self) -> None:
        """Process the lead's answers that have arrived."""
        while self.has_landed:
            order_request = self._in_flight[0]
            if order_request.asked.answer is None:
                order_request.asked.link.finish_first()
            if order_request.asked.answer is None:  # its server was lost: it has been sent again to another
                return
            self._in_flight.popleft()
            try:
                answer = order_request.asked.wait()
            except OrchestrayError as error:
                for asker in dict.fromkeys([*(one for one, _ in order_request.acknowledged), *order_request.askers]):
                    asker.waits = False
                    self._fail(asker, error)
                self._waiting = [asker for asker in self._waiting if asker.waits]
                continue
            self._on_orders(order_request, answer)

    def _on_orders(self, order_request: _OrderRequest, answer: Answer) -> None:
        if order_request.acknowledged:
            for asker in _count(order_request.acknowledged, answer.counts_for):
                if asker.request.next is None:
                    self._finish(asker)
        if answer.flush and isinstance(self._copy, LocalCopy):
            self._copy.send(everything=True)
        given: list[tuple[Asker, Order]] = []
        for asker, order in zip(order_request.askers, answer.orders, strict=True):
            if not asker.waits:
                continue  # it has one, or is gone
            assert asker.request.next is not None
            asker.is_told = asker.request.next.wait and order in (None, Wait())
            if not asker.is_told:
                given.append((asker, order or Wait()))
        if given:
            self._fetch_for([order for _, order in given])
        for asker, order in given:
            asker.waits = False
            self._waiting.remove(asker)
            asker.answer.order = order
            if isinstance(order, Compute):
                self._out[order.order_id] = (asker.worker, order.step)
            self._finish(asker)

    def _fetch_for(self, orders: Sequence[Order]) -> None:
        """Fetch the parameters that orders need before a worker asks for them."""
        if isinstance(self._copy, GroupCopy) and (self._out or self._copy.waiting):
            return  # who joins a round computes with its parameters
        if isinstance(self._copy, BatchCopy):
            self._copy.prepare(max(order.min_version if isinstance(order, Compute) else 0 for order in orders))
        elif not all(isinstance(order, Compute | Wait) for order in orders):
            self._copy.fetch()

    # -- lost workers ------------------------------------------------------------------------------------------------

    def lose(self, worker: int, channel: Channel) -> None:
        """Forget a worker whose channel has ended, unless it has come back over another channel."""
        self._tally.end(channel)
        if self._connected.get(worker) is not channel:
            return
        self._forget(worker)
        del self._connected[worker]
        self._upstream.relay(Entry(worker=worker, leave=True))
        if not self._connected and isinstance(self._copy, LocalCopy):
            self._copy.send(everything=True)

    def _forget(self, worker: int) -> None:
        """Forget what a worker had, after completing the shares that this leaf's parameters already contain."""
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


def _count(acknowledged: Sequence[tuple[Asker, ReportOf]], counts: Sequence[bool]) -> dict[Asker, None]:
    """Record for each share if it counts; return the requests that pushed them, in order."""
    for (asker, _), one in zip(acknowledged, counts, strict=True):
        asker.answer.counts = asker.answer.counts and one
    return dict.fromkeys(asker for asker, _ in acknowledged)
