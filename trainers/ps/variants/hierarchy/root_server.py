"""The shards under leaf servers: requests on behalf of several workers, in one message of their leaf.

A leaf is distinguished from a worker by its number: leaf k is -1 - k. Besides the sections of `messages` it sends

- `relay`: `[{"worker": w, ...}, ...]`: reports of workers, each as a request of its own. Lead only.
- `push` with `workers`: the sum of shares of one batch; to the lead with the worker of each order, for the claims.
- `change`: `[number, owes]`: parameters that the leaf has moved itself, in the tensors in the form of
  `significance_filter.pack`, followed by the buffers' change. A change is applied once, also if it is sent again to a
  copy that has taken over; `owes` says that the leaf keeps a part back.
- `acknowledge_for`: `[[worker, order_id, loss_sum, read_version, write_version], ...]`. Lead only. With a change it is
  about the shares in that change: both are done, or neither.
- `asks`: `[[worker, order ids it holds, wait], ...]`: requests for orders. The answer comes when one of the workers has
  something to do, or the leaf is to send what it keeps back (`flush`). Lead only.
- `refresh`: the version that the leaf has: the values that are new since then, or all.

While a leaf keeps something back, no worker is ordered to validate, to save or to finish. When a leaf dies, what it
kept back is lost with it, and the run goes back to the last checkpoint; until then nothing is saved either.

Sources: Gupta et al., "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning" (Rudra, 2016), section 3 (the
tree of aggregating servers); Hsieh et al., "Gaia" (2017), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Handle, Message
from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.shard import Origin
from orchestray.trainers.ps.server.state_machine import Entry, Machine
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
        self._changes: dict[int, list[Any]] = {}
        """Number of each leaf's last change, and True if it keeps something back."""
        self._lost: set[int] = set()
        """Leaves that have left: only some shards may have their last changes."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        caller = int(entry.get("worker", 0))
        if caller >= 0:
            return super().apply(entry, tensors)
        answer: dict[str, Any] = {}
        if "hello" in entry and entry["hello"]["is_new"]:
            self._leave_all(caller)
            self._lost.discard(caller)
            self._changes[caller] = [0, False]
        if "leave" in entry:
            self._leave_all(caller)
        if "relay" in entry:
            answer["relayed"] = [self._relayed(caller, one) for one in entry["relay"]]
        if "push" in entry:
            answer |= self._push_sum(entry["push"], tensors)
        if "change" in entry:
            self._change(caller, entry["change"], list(tensors))
        if "acknowledge_for" in entry:
            acknowledged = entry["acknowledge_for"]
            answer["counts"] = [self._acknowledge(int(worker), [report]) for worker, *report in acknowledged]
        if "asks" in entry:
            answer |= self._orders(caller, entry["asks"])
        if "advance" in entry:
            self.shard.advance(int(entry["advance"]))
        return answer

    def _relayed(self, leaf: int, report: Mapping[str, Any]) -> dict[str, Any]:
        worker = int(report["worker"])
        if "leave" in report and worker not in self._members.get(leaf, ()):
            return {}  # it has come back through another leaf
        for members in self._members.values():
            members.discard(worker)
        if "leave" not in report:
            self._members.setdefault(leaf, set()).add(worker)
        return super().apply(report)

    def _leave_all(self, leaf: int) -> None:
        """Remove a lost leaf and its workers, until they come back through another leaf."""
        if self._changes.pop(leaf, None) is not None:
            self._lost.add(leaf)
        for worker in sorted(self._members.pop(leaf, ())):
            if self.coordinator is not None:
                self.coordinator.leave(worker)

    def _push_sum(self, push: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        answer: dict[str, Any] = {"taken": False, "missing": [], "version": self.shard.version, "staleness": 0}
        if self.coordinator is not None:
            there, orders = self.coordinator.workers, zip(push["workers"], push["orders"], strict=True)
            answer["claimed"] = [
                order for worker, order in orders if worker in there and self.lead.claim(worker, order)
            ]
            if len(answer["claimed"]) < len(push["orders"]):
                return answer
        gradient, buffers = self._decoded(push["encoding"], list(tensors))
        done = self.shard.push(Origin.from_json(push["origin"]), gradient, push["unused"], buffers)
        answer |= {"taken": done.taken, "staleness": done.staleness, "version": done.version, "kept": done.kept}
        answer["missing"] = [part.to_json() for part in done.missing]
        return answer

    def _change(self, leaf: int, header: Sequence[Any], tensors: list[Tensor]) -> None:
        number, owes = header
        known = self._changes.get(leaf)
        if known is None:
            raise TrainingError(f"Leaf server {-1 - leaf} was given up by its parameter servers.")
        if number <= known[0]:
            return
        self._changes[leaf] = [number, owes]
        if self.shard.buffers is not None and len(tensors) > 2:
            self.shard.buffers.add(BufferPush(*tensors[-2:]))
            tensors = tensors[:-2]
        places, change = unpack(tensors)
        if change.numel():
            self.shard.move(change, places)

    def _orders(self, leaf: int, asks: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return the answer to `asks`.

        Returns:
            `orders`: one per request, None: not yet. `flush`: send what is kept back first.
        """
        owing = {one for one, (_, owes) in self._changes.items() if owes}
        orders: list[dict[str, Any] | None] = []
        flush = False
        for worker, holding, wait in asks:
            if (owing or self._lost) and self.lead.at_barrier:
                orders.append(None)
                flush = leaf in owing
            else:
                orders.append(self._next(int(worker), {"holding": holding, "wait": wait}))
        return {"orders": orders, "flush": flush}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state, tensors = super().state()
        members = [[leaf, sorted(workers)] for leaf, workers in self._members.items()]
        changes = [[leaf, *change] for leaf, change in self._changes.items()]
        return {**state, "members": members, "changes": changes, "lost": sorted(self._lost)}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state(state, tensors)
        self._members = {int(leaf): set(workers) for leaf, workers in state["members"]}
        self._changes = {int(leaf): list(change) for leaf, *change in state["changes"]}
        self._lost = set(state["lost"])


class RootServer(ShardServer):
    """A server for leaf servers."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        """Take the same arguments as `ShardServer`."""
        super().__init__(*args, **rest)
        self._known: dict[int, tuple[int, Tensor]] = {}
        """Version that each leaf has, and its copy of the values."""

    def _answer(
        self, request: dict[str, Any], worker: int | None, tensors: Sequence[Tensor], asked: Handle[Message]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        rest = {name: section for name, section in request.items() if name not in ("asks", "refresh")}
        if worker is None or worker >= 0 or len(rest) == len(request):
            return super()._answer(request, worker, tensors, asked)
        if "change" in request:
            self._own_change(worker, list(tensors))
        answer, reply = super()._answer(rest, worker, tensors, asked)
        with self._changed:
            if "asks" in request:
                again = {"worker": worker, "asks": request["asks"]}
                found = self._try_asks(again)
                if found is None and any(wait for _, _, wait in request["asks"]):
                    found = self._until(lambda: self._try_asks(again), asked)
                answer |= found or {"orders": [None] * len(request["asks"]), "flush": False}
            if "refresh" in request:
                reply = self._news(worker, int(request["refresh"]))
                answer["version"] = self._machine.shard.version
            safe = self._followers.barrier()
        safe()
        self.events.deliver()
        return answer, reply

    def _try_asks(self, again: Entry) -> dict[str, Any] | None:
        answer = self._machine.apply(again)
        if not (answer["flush"] or any(answer["orders"])):
            return None  # nothing has changed, so the followers need no entry
        self._followers.tell(again, ())
        self._changed.notify_all()
        return answer

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
