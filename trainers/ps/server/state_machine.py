"""The whole state of a server as a state machine: a shard and, on the lead, the coordinator.

Its inputs are entries (JSON, with a gradient). The same entries in the same order make the same state, bit for bit. So
a backup that receives them is a copy of its primary, and a log of them on disk can restore the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Wait, order_to_json
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.messages import COMPRESSED, RUNS, SPARSE, sparse_to_dense
from orchestray.trainers.ps.protocol.partition import slice_views
from orchestray.trainers.ps.protocol.residuals import Residuals
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient
from orchestray.trainers.ps.server.shard import Origin, Shard

Entry = Mapping[str, Any]
Listener = Callable[[dict[str, Any]], None]


def silent(_event: dict[str, Any]) -> None:
    """Ignore an event."""


class Machine:
    """The state machine that `ShardServer` serves.

    Attributes:
        listener: receives the coordinator's events on the lead, in order: steps that are done, means of validations,
            copies that were dropped. Called while its server is locked, so it must only take note.
    """

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator | None = None,
        decoder: Compressor | None = None,
        *,
        is_reached: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> None:
        """
        Args:
            shard: part of the parameters.
            coordinator: coordinator; None except on the lead.
            decoder: compressor made like the workers' compressors for this shard; initialised here.
            is_reached: on the lead: returns True if these means of a validation end the run (`train.until`). It must
                depend on the means alone.
        """
        self.shard = shard
        self.coordinator = coordinator
        self.listener: Listener = silent
        self._is_reached = is_reached
        self._decoder = decoder
        if decoder is not None:
            decoder.init(slice_views(shard.slices, shard.values))
        self.residuals = None if decoder is None else Residuals(decoder)
        """State of the workers' compressors; None if gradients are not compressed."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Apply one entry.

        An OrchestrayError is raised again whenever the entry is applied to the same state.

        Args:
            entry: sections as in `messages`, and `worker`. The run's driver adds `coordinator`: [method, arguments].
                The server adds `took_s`: for each acknowledged share the seconds since it was handed out, or null.
            tensors: tensors of a push; they may be changed.

        Returns:
            The result of each section, and `kept`: True if the first of the tensors is now part of the state.
        """
        worker, answer = int(entry.get("worker", -1)), dict[str, Any]()
        if "hello" in entry:
            self._greet(worker, bool(entry["hello"]["is_new"]))
        if "leave" in entry:
            self.lead.leave(worker)
        if "coordinator" in entry:
            self._drive(*entry["coordinator"])
        if "push" in entry:
            answer |= self._push(worker, entry, tensors)
        elif "acknowledge" in entry:
            answer["counts"] = self._acknowledge(worker, entry["acknowledge"], entry.get("took_s"))
        answer |= self._deposits(worker, entry, tensors)
        if "validated" in entry:
            answer["means"] = self._validated(worker, *entry["validated"])
        if "saved" in entry:
            answer["saved"] = self.lead.saved(worker, entry["saved"])
            self.listener({"event": "saved", "order_id": entry["saved"], "counts": answer["saved"]})
        if "next" in entry:
            answer["order"] = self._next(worker, entry["next"])
        if "advance" in entry:
            self.shard.advance(int(entry["advance"]))
        return answer

    @property
    def lead(self) -> Coordinator:
        """The coordinator; raises TrainingError if this is not the lead."""
        if self.coordinator is None:
            raise TrainingError("This server has no coordinator: orders and reports go to the lead, shard 0.")
        return self.coordinator

    @property
    def _kept(self) -> Residuals:
        if self.residuals is None:
            raise TrainingError("A worker told of what its compressor keeps, and this server knows of no compression.")
        return self.residuals

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the whole state: JSON values, and tensors that are the machine's own memory."""
        shard, tensors = self.shard.state()
        state = {"shard": shard, "coordinator": None if self.coordinator is None else self.coordinator.to_json()}
        if self.residuals is not None:
            state["residuals"], kept = self.residuals.state()
            tensors |= kept
        return state, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Become a copy of the machine whose `state` this is, which was made with the same arguments."""
        self.shard.load_state(state["shard"], tensors)
        if self.residuals is not None:
            self.residuals.load_state(state["residuals"], tensors)
        self.coordinator = None if state["coordinator"] is None else Coordinator.from_json(state["coordinator"])

    def _drive(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Pass a call of the run's driver to the coordinator."""
        if method == "request_stop":
            self.lead.request_stop(**arguments)
        elif method == "resize":
            self.lead.resize(**arguments)
        elif method == "dismiss":
            self.lead.dismiss(**arguments)
        else:
            text = f"A driver cannot call {method!r} on the coordinator; only request_stop, resize and dismiss."
            raise TrainingError(text)

    def _greet(self, worker: int, is_new: bool) -> None:
        if self.coordinator is not None and (is_new or worker not in self.coordinator.workers):
            self.coordinator.join(worker)

    def _push(self, worker: int, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        push = entry["push"]
        if self.coordinator is not None:
            known = worker in self.coordinator.workers
            claimed = [order_id for order_id in push["orders"] if known and self.coordinator.claim(worker, order_id)]
            if len(claimed) < len(push["orders"]):
                return {"claimed": claimed, "counts": False, "taken": False, "version": self.shard.version}
        gradient, buffers = self._decoded(push["encoding"], list(tensors))
        residuals = self.residuals if push["encoding"] == COMPRESSED else None
        if residuals is not None:
            residuals.add_owed(gradient)
        done = self.shard.push(Origin.from_json(push["origin"]), gradient, push["unused"], buffers)
        if residuals is not None and done.taken:
            residuals.taken(worker)
            residuals.paid()
        answer: dict[str, Any] = {"taken": done.taken, "staleness": done.staleness, "version": done.version}
        answer |= {"claimed": push.get("orders", []), "kept": done.kept}
        answer["missing"] = [part.to_json() for part in done.missing]
        if "acknowledge" in entry:
            read, write = push["origin"][2], push["origin"][2] + done.staleness
            acknowledge = [[order_id, loss_sum, read, write] for order_id, loss_sum in entry["acknowledge"]]
            answer["counts"] = not done.missing and self._acknowledge(worker, acknowledge, entry.get("took_s"))
            answer["version"] = self.shard.version
        return answer

    def _deposits(self, worker: int, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Take what a worker sends of its compressor's state."""
        if "deposit" in entry:
            self._kept.deposit(worker, entry["deposit"], tensors)
        if "hand_over" in entry:
            self._kept.hand_over(worker, entry["hand_over"], tensors)
        if "deposited" in entry:
            return {"deposited": self.lead.deposited(worker, entry["deposited"])}
        return {}

    def _decoded(self, encoding: str, tensors: list[Tensor]) -> tuple[Tensor, BufferPush | None]:
        if encoding == COMPRESSED:
            if self._decoder is None:
                raise TrainingError("A worker sent a compressed gradient, and this server knows of no compression.")
            parts = self._decoder.decompress(tensors[0])
            gradient, rest = self.shard.values.new_empty(self.shard.values.shape), tensors[1:]
            for view, part in zip(slice_views(self.shard.slices, gradient), parts, strict=True):
                view.copy_(part)
        elif encoding == SPARSE:
            gradient = sparse_to_dense(tensors[0], tensors[1], self.shard.values.new_empty(self.shard.values.shape))
            rest = tensors[2:]
        elif encoding == RUNS:
            gradient, rest = RowSparseGradient(*tensors[:3]).fill(torch.empty_like(self.shard.values)), tensors[3:]
        else:
            gradient, rest = tensors[0], tensors[1:]
        return gradient, BufferPush(rest[0], rest[1]) if rest else None

    def _acknowledge(
        self, worker: int, acknowledged: Sequence[Sequence[Any]], took_s: Sequence[float | None] | None = None
    ) -> bool:
        counts, took_s = [], took_s or [None] * len(acknowledged)
        for (order_id, loss_sum, read, write), seconds in zip(acknowledged, took_s, strict=True):
            ack = self.lead.acknowledge(
                worker, order_id, loss_sum, read_version=read, write_version=write, took_s=seconds
            )
            counts.append(ack.counts)
            for done in ack.done_steps:
                self.shard.advance(done.step)
                self.listener({"event": "step", **vars(done)})
            if ack.dropped:
                self.listener({"event": "dropped", "order_id": order_id, "workers": list(ack.dropped)})
        return all(counts)

    def _validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        means = self.lead.validated(worker, order_id, sums)
        if means is not None:
            if self._is_reached is not None and self._is_reached(means):
                self.lead.request_stop("until")
            self.listener({"event": "validated", "order_id": order_id, "means": means, "best": self.lead.best})
        return means

    def _next(self, worker: int, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the next order; None if there is none yet and nothing has changed."""
        if worker not in self.lead.workers:
            raise TrainingError(f"Worker {worker} was given up by the lead server; it must say hello again.")
        order = self.lead.next(worker, asked["holding"])
        if isinstance(order, Wait) and asked["wait"] and not order.drain:
            return None
        return order_to_json(order)
