"""All that a server knows, as a state machine: a shard, and on the lead the ledger.

Its inputs are entries (JSON, with a gradient). The same entries in the same order make the same state, bit for bit; so
a backup that is told them is a copy of its primary, and a log of them on disk is the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.messages import COMPRESSED, RUNS, SPARSE, sparse_to_dense
from orchestray.trainers.central.orders import Wait, order_to_json
from orchestray.trainers.central.partition import slice_views
from orchestray.trainers.central.residuals import Residuals
from orchestray.trainers.central.runs import Runs
from orchestray.trainers.central.shard import Origin, Shard
from orchestray.trainers.compression.base import Compressor

Entry = Mapping[str, Any]
Listener = Callable[[dict[str, Any]], None]


def silent(_event: dict[str, Any]) -> None:
    """For who need not hear."""


class Machine:
    """What `ShardServer` serves.

    Attributes:
        listener: is told, in order, what the lead's ledger says: steps that are done, means of validations, copies that
            were dropped. Called while the server is locked: it must only take note.
    """

    def __init__(
        self,
        shard: Shard,
        ledger: Ledger | None = None,
        decoder: Compressor | None = None,
        *,
        is_reached: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> None:
        """
        Args:
            shard: the part of the parameters.
            ledger: on the lead.
            decoder: made as the workers' compressors for this shard; initialised here.
            is_reached: on the lead: whether these means of a validation end the run (`train.until`). It must depend on
                them alone.
        """
        self.shard = shard
        self.ledger = ledger
        self.listener: Listener = silent
        self._is_reached = is_reached
        self._decoder = decoder
        if decoder is not None:
            decoder.init(slice_views(shard.slices, shard.values))
        self.residuals = None if decoder is None else Residuals(decoder)
        """What workers' compressors keep; None: gradients are not compressed."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Take in one entry; returns what each section of it led to, and `kept`: whether the first of the tensors is
        part of the state now.

        An error (OrchestrayError) comes again whenever the entry is applied to the same state.

        Args:
            entry: sections as in `messages`, and `worker`; also `ledger`: [method, arguments], of the run's driver; and
                `took_s`: of what is acknowledged, how long each took since it was given out, or null.
            tensors: of a push; may be changed.
        """
        worker, answer = int(entry.get("worker", -1)), dict[str, Any]()
        if "hello" in entry:
            self._greet(worker, bool(entry["hello"]["anew"]))
        if "leave" in entry:
            self.lead.leave(worker)
        if "ledger" in entry:
            self._drive(*entry["ledger"])
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
    def lead(self) -> Ledger:
        """The ledger; TrainingError where this is not the lead."""
        if self.ledger is None:
            raise TrainingError("This server holds no ledger: orders and reports go to the lead, shard 0.")
        return self.ledger

    @property
    def _kept(self) -> Residuals:
        if self.residuals is None:
            raise TrainingError("A worker told of what its compressor keeps, and this server knows of no compression.")
        return self.residuals

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of it: JSON, and tensors that are the machine's own memory."""
        shard, tensors = self.shard.state()
        state = {"shard": shard, "ledger": None if self.ledger is None else self.ledger.to_json()}
        if self.residuals is not None:
            state["residuals"], kept = self.residuals.state()
            tensors |= kept
        return state, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Become a copy of what `state` told, of a machine made with the same arguments."""
        self.shard.load_state(state["shard"], tensors)
        if self.residuals is not None:
            self.residuals.load_state(state["residuals"], tensors)
        self.ledger = None if state["ledger"] is None else Ledger.from_json(state["ledger"])

    def _drive(self, method: str, arguments: Mapping[str, Any]) -> None:
        """What the run's driver tells the ledger."""
        if method == "request_stop":
            self.lead.request_stop(**arguments)
        elif method == "resize":
            self.lead.resize(**arguments)
        elif method == "dismiss":
            self.lead.dismiss(**arguments)
        else:
            text = f"A driver cannot call {method!r} on the ledger; only request_stop, resize and dismiss."
            raise TrainingError(text)

    def _greet(self, worker: int, anew: bool) -> None:
        if self.ledger is not None and (anew or worker not in self.ledger.workers):
            self.ledger.join(worker)

    def _push(self, worker: int, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        push = entry["push"]
        if self.ledger is not None:
            known = worker in self.ledger.workers
            claimed = [order_id for order_id in push["orders"] if known and self.ledger.claim(worker, order_id)]
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
        """What a worker tells of what its compressor keeps."""
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
            gradient, rest = Runs(*tensors[:3]).fill(torch.empty_like(self.shard.values)), tensors[3:]
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
            self.listener({"event": "validated", "order_id": order_id, "means": means})
        return means

    def _next(self, worker: int, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """None: not yet, and nothing has changed."""
        if worker not in self.lead.workers:
            raise TrainingError(f"Worker {worker} was given up by the lead server; it must say hello again.")
        order = self.lead.next(worker, asked["holding"])
        if isinstance(order, Wait) and asked["wait"] and not order.drain:
            return None
        return order_to_json(order)
