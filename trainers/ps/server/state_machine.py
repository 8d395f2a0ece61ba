"""The whole state of a server as a state machine: a shard and, on the lead, the coordinator.

Its inputs are entries. The same entries in the same order make the same state, bit for bit. So
a backup that receives them is a copy of its primary, and a log of them on disk can restore the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Order, Wait
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.encoding import GradientDecoder
from orchestray.trainers.ps.protocol.requests import COMPRESSED, Answer, Asking, Entry, Push, Report, Validated
from orchestray.trainers.ps.protocol.residuals import Residuals
from orchestray.trainers.ps.server.shard import Applied, Shard

Listener = Callable[[dict[str, Any]], None]


def silent(_event: dict[str, Any]) -> None:
    """Ignore an event."""


class Machine:
    """The state machine that `ShardServer` serves.

    Attributes:
        listener: receives the coordinator's events on the lead, in order: steps that are done, means of validations,
            copies that were dropped. Called while its server is locked, so it must only take note.
        keeps_gradient: True if the first of the tensors of the last entry is now part of the state.
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
        self.keeps_gradient = False
        self._is_reached = is_reached
        self._decoder = GradientDecoder(shard.slices, shard.values, decoder)
        self.residuals = None if decoder is None else Residuals(decoder)
        """State of the workers' compressors; None if gradients are not compressed."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> Answer:
        """Apply one entry; return the answers of its sections.

        An OrchestrayError is raised again whenever the entry is applied to the same state.

        Args:
            entry: entry to apply.
            tensors: tensors of a push, or of what a compressor keeps; they may be changed.
        """
        worker, answer = entry.worker, Answer()
        self.keeps_gradient = False
        lead, hello = self.coordinator, entry.hello
        if hello is not None and lead is not None and (hello.is_new or worker not in lead.workers):
            lead.join(worker)
        if entry.leave:
            self.lead.leave(worker)
        if entry.stop is not None:
            self.lead.request_stop(entry.stop.reason, validate=entry.stop.validate)
        if entry.resize is not None:
            self.lead.resize(entry.resize)
        if entry.dismiss:
            self.lead.dismiss(worker)
        if entry.push is not None:
            self._push(entry, entry.push, tensors, answer)
        elif entry.acknowledge:
            answer.counts = self._acknowledge(worker, entry.acknowledge, entry.took_s)
        self._deposits(entry, tensors, answer)
        if entry.validated is not None:
            answer.means = self._validated(worker, entry.validated)
        if entry.saved is not None:
            answer.saved = self.lead.saved(worker, entry.saved)
            self.listener({"event": "saved", "order_id": entry.saved, "counts": answer.saved})
        if entry.next is not None:
            answer.order = self._next(worker, entry.next)
        if entry.advance is not None:
            self.shard.advance(entry.advance)
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

    def _push(self, entry: Entry, push: Push, tensors: Sequence[Tensor], answer: Answer) -> None:
        worker, answer.claimed = entry.worker, push.orders
        residuals = self.residuals if push.encoding == COMPRESSED else None
        if self.coordinator is not None:
            answer.claimed = tuple([one for one in push.orders if self.coordinator.claim(worker, one)])
            if len(answer.claimed) < len(push.orders):
                answer.version = self.shard.version
                answer.is_dropped = residuals is not None and not residuals.has(worker, push.origin.parts)
                return
        gradient, buffers = self._decoder.decode(push.encoding, tensors)
        if residuals is not None:
            residuals.add_owed(gradient)
        done = self._applied(push, gradient, buffers, answer)
        if residuals is not None:
            if done.taken:
                residuals.taken(worker, push.origin.parts)
                residuals.paid()
            answer.is_dropped = not residuals.has(worker, push.origin.parts)
        if entry.acknowledge:
            read, write = push.origin.read_version, push.origin.read_version + done.staleness
            reports = [Report(report.order_id, report.loss_sum, read, write) for report in entry.acknowledge]
            answer.counts = not done.missing and self._acknowledge(worker, reports, entry.took_s)
            answer.version = self.shard.version

    def _applied(self, push: Push, gradient: Tensor, buffers: BufferPush | None, answer: Answer) -> Applied:
        """Apply a gradient to the shard, and enter the outcome in the answer."""
        done = self.shard.push(push.origin, gradient, push.unused, buffers)
        answer.taken, answer.staleness, answer.version = done.taken, done.staleness, done.version
        answer.missing, self.keeps_gradient = done.missing, done.kept
        return done

    def _deposits(self, entry: Entry, tensors: Sequence[Tensor], answer: Answer) -> None:
        """Take what a worker sends of its compressor's state."""
        if entry.deposit is not None:
            self._kept.deposit(entry.worker, entry.deposit, tensors)
        if entry.hand_over is not None:
            self._kept.hand_over(entry.worker, entry.hand_over, tensors)
        if entry.deposited is not None:
            answer.deposited = self.lead.deposited(entry.worker, entry.deposited)

    def _acknowledge(self, worker: int, reports: Sequence[Report], took_s: Sequence[float | None] = ()) -> bool:
        counts = []
        for (order_id, loss_sum, read, write), seconds in zip_longest(reports, took_s):
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

    def _validated(self, worker: int, report: Validated) -> dict[str, float] | None:
        means = self.lead.validated(worker, report.order_id, report.sums)
        if means is not None:
            if self._is_reached is not None and self._is_reached(means):
                self.lead.request_stop("until")
            told = {"event": "validated", "order_id": report.order_id, "means": means, "best": self.lead.best}
            self.listener(told)
        return means

    def _next(self, worker: int, asking: Asking) -> Order | None:
        """Return the next order; None if there is none yet and nothing has changed."""
        order = self.lead.next(worker, asking.holding)
        return None if isinstance(order, Wait) and asking.wait and not order.drain else order
