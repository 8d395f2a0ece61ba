"""The shards under leaf servers: requests on behalf of several workers, in one message of their leaf.

A leaf is distinguished from a worker by its number: leaf k is -1 - k. The sections of `requests` that only a leaf sends
say so.

While a leaf keeps something back, no worker is ordered to validate, to save or to finish. When a leaf dies, what it
kept back is lost with it, and the run goes back to the last checkpoint; until then nothing is saved either.

Sources: Gupta et al., "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning" (Rudra, 2016), section 3 (the
tree of aggregating servers); Hsieh et al., "Gaia" (2017), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.assignments import Order
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.requests import NOBODY, Answer, AskingOf, Change, Entry, Push, Request
from orchestray.trainers.ps.server.server import Asker, ShardServer
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.hierarchy.significance_filter import pack, unpack


def number_of_leaf(leaf: int) -> int:
    """Return the number of a leaf where workers are numbered by their rank."""
    return -1 - leaf


class RootMachine(Machine):
    """A state machine that applies the requests of leaf servers."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        """Take the same arguments as `Machine`."""
        super().__init__(*args, **rest)
        self._members: dict[int, set[int]] = {}
        """Workers of each leaf."""
        self._changes: dict[int, Change] = {}
        """Each leaf's last change."""
        self._lost: set[int] = set()
        """Leaves that have left: only some shards may have their last changes."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> Answer:
        caller = entry.worker
        if caller >= 0 or caller == NOBODY:
            return super().apply(entry, tensors)
        answer = Answer()
        self.keeps_gradient = False
        if entry.hello is not None and entry.hello.is_new:
            self._leave_all(caller)
            self._lost.discard(caller)
            self._changes[caller] = Change(0, owes=False)
        if entry.leave:
            self._leave_all(caller)
        answer.relayed = tuple(self._relayed(caller, report) for report in entry.relay)
        if entry.push is not None:
            self._push_sum(entry.push, tensors, answer)
        if entry.change is not None:
            self._change(caller, entry.change, list(tensors))
        answer.counts_for = tuple(self._acknowledge(worker, [report]) for worker, report in entry.acknowledge_for)
        if entry.asks is not None:
            answer.orders, answer.flush = self._orders(caller, entry.asks)
        if entry.advance is not None:
            self.shard.advance(entry.advance)
        return answer

    def _relayed(self, leaf: int, report: Entry) -> Answer:
        worker = report.worker
        if report.leave and worker not in self._members.get(leaf, ()):
            return Answer()  # it has come back through another leaf
        for members in self._members.values():
            members.discard(worker)
        if not report.leave:
            self._members.setdefault(leaf, set()).add(worker)
        return super().apply(report)

    def _leave_all(self, leaf: int) -> None:
        """Remove a lost leaf and its workers, until they come back through another leaf."""
        if self._changes.pop(leaf, None) is not None:
            self._lost.add(leaf)
        for worker in sorted(self._members.pop(leaf, ())):
            if self.coordinator is not None:
                self.coordinator.leave(worker)

    def _push_sum(self, push: Push, tensors: Sequence[Tensor], answer: Answer) -> None:
        answer.version = self.shard.version
        if self.coordinator is not None:
            orders = zip(push.workers, push.orders, strict=True)
            answer.claimed = tuple(order for worker, order in orders if self.coordinator.claim(worker, order))
            if len(answer.claimed) < len(push.orders):
                return
        self._applied(push, *self._decoder.decode(push.encoding, tensors), answer)

    def _change(self, leaf: int, change: Change, tensors: list[Tensor]) -> None:
        known = self._changes.get(leaf)
        if known is None:
            raise TrainingError(f"Leaf server {-1 - leaf} was given up by its parameter servers.")
        if change.number <= known.number:
            return
        self._changes[leaf] = change
        if self.shard.buffers is not None and len(tensors) > 2:
            self.shard.buffers.add(BufferPush(*tensors[-2:]))
            tensors = tensors[:-2]
        places, moves = unpack(tensors)
        if moves.numel():
            self.shard.move(moves, places)

    def _orders(self, leaf: int, asks: Sequence[AskingOf]) -> tuple[tuple[Order | None, ...], bool]:
        """Return one order per request, None: not yet; and True if the leaf is first to send what it keeps back."""
        owing = {one for one, change in self._changes.items() if change.owes}
        orders: list[Order | None] = []
        flush = False
        for worker, asking in asks:
            if (owing or self._lost) and self.lead.at_barrier:
                orders.append(None)
                flush = leaf in owing
            else:
                orders.append(self._next(worker, asking))
        return tuple(orders), flush

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state, tensors = super().state()
        members = [[leaf, sorted(workers)] for leaf, workers in self._members.items()]
        changes = [[leaf, *change] for leaf, change in self._changes.items()]
        return {**state, "members": members, "changes": changes, "lost": sorted(self._lost)}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state(state, tensors)
        self._members = {int(leaf): set(workers) for leaf, workers in state["members"]}
        self._changes = {int(leaf): Change(*change) for leaf, *change in state["changes"]}
        self._lost = set(state["lost"])


class RootServer(ShardServer):
    """A server for leaf servers."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        """Take the same arguments as `ShardServer`."""
        super().__init__(*args, **rest)
        self._known: dict[int, tuple[int, Tensor]] = {}
        """Version that each leaf has, and its copy of the values."""

    def _answer(self, request: Request, asker: Asker, tensors: Sequence[Tensor]) -> tuple[Answer, list[Tensor]]:
        leaf, asks = asker.worker, request.asks
        if leaf is None or leaf >= 0 or (asks is None and request.refresh is None):
            return super()._answer(request, asker, tensors)
        if request.change is not None:
            self._own_change(leaf, list(tensors))
        answer, reply = super()._answer(replace(request, asks=None, refresh=None), asker, tensors)
        with self._changing():
            if asks is not None:
                again = Entry(worker=leaf, asks=asks)
                found = self._try(again)
                if found is None and any(asking.wait for _, asking in asks):
                    found = self._until(lambda: self._try(again), asker.asked)
                answer.orders, answer.flush = (found.orders, found.flush) if found else ((None,) * len(asks), False)
            if request.refresh is not None:
                reply = self._news(leaf, request.refresh)
                answer.version = self._machine.shard.version
        return answer, reply

    @torch.no_grad()
    def _own_change(self, leaf: int, tensors: list[Tensor]) -> None:
        """Add a leaf's own change to the record of its values, so that it is not sent back to the leaf."""
        known = self._known.get(leaf)
        if known is None:
            return
        places, change = unpack(tensors[:-2] if len(tensors) > 2 else tensors)
        if places is None:
            known[1].add_(change)
        else:
            known[1].index_add_(0, places, change)

    @torch.no_grad()
    def _news(self, leaf: int, version: int) -> list[Tensor]:
        shard = self._machine.shard
        known = self._known.get(leaf)
        if known is None or known[0] != version:
            self._known[leaf] = (shard.version, shard.values.clone())
            reply = [shard.values.clone()]
        else:
            places = (shard.values != known[1]).nonzero().flatten()
            sparse = pack(places, shard.values[places], shard.values.numel())
            reply = [shard.values.clone()] if len(sparse) == 1 else sparse
            known[1].copy_(shard.values)
            self._known[leaf] = (shard.version, known[1])
        if shard.buffers is not None:
            reply += [shard.buffers.floats.clone(), shard.buffers.integers.clone()]
        return reply
