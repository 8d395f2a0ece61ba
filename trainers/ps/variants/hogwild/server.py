"""The lead server of workers that change shared parameters themselves: it hands out shares and has the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.requests import Answer, Entry, Report
from orchestray.trainers.ps.protocol.settings import MAX_AHEAD
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.hogwild.hogwild import shape_of
from orchestray.trainers.ps.variants.hogwild.shared_values import SharedValues

if TYPE_CHECKING:
    from torch import nn

    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.optim.optimizers import Optimizer
    from orchestray.trainers.ps.protocol.buffers import Buffers


def share(settings: ReplicaSettings, model: nn.Module, optimizer: Optimizer, buffers: Buffers) -> SharedValues:
    """Create the memory of a run, filled with the model's parameters and buffers.

    Args:
        settings: settings of the run.
        model: model of the run.
        optimizer: optimizer, not yet initialised.
        buffers: buffers of the model.
    """
    shared = SharedValues.create(shape_of(model, settings, optimizer, buffers))
    for view, parameter in zip(
        shared.views(shared.values), (p for p in model.parameters() if p.requires_grad), strict=True
    ):
        view.copy_(parameter.detach())
    shared.buffers.floats.copy_(buffers.floats)
    shared.buffers.integers.copy_(buffers.integers)
    return shared


class OrderingMachine(Machine):
    """A state machine that answers a `next` with several orders, if it asks for `more`."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> Answer:
        answer = super().apply(entry, tensors)
        if entry.next is not None and isinstance(answer.order, Compute):
            answer.more = tuple(self.lead.next_shares(entry.worker, min(entry.next.more, self._fair_part())))
        return answer

    def _fair_part(self) -> int:
        """Return the number of shares that one worker may get of those left before the next barrier: half of its even
        part.

        The other workers should have something to do until the end (Hummel, Schonberg and Flynn 1992, "Factoring").
        """
        coordinator, plan = self.lead, self.lead.settings
        most = 2 * MAX_AHEAD * len(coordinator.workers) // coordinator.num_shares + 1
        step, last = coordinator.begun_step, min(plan.last_step, coordinator.begun_step + most)
        while step < last and not (plan.validates_after(step, False) or plan.saves_after(step, False)):
            step += 1
        return (step - coordinator.begun_step) * coordinator.num_shares // (2 * len(coordinator.workers))


class HogwildServer(ShardServer):
    """A server of orders. The shares that a lost worker had begun are in its journal, and count as done."""

    def __init__(self, machine: Machine, shared: SharedValues) -> None:
        super().__init__(machine)
        self._shared = shared

    def _apply(self, entry: Entry, tensors: Sequence[Tensor]) -> Answer:
        worker = entry.worker
        if entry.leave:
            self._shared.expel(worker)
        if entry.leave or entry.hello is not None:
            begun = self._shared.left_by(worker)
            if begun:
                super()._apply(Entry(worker=worker, acknowledge=tuple(Report(*report) for report in begun)), ())
        return super()._apply(entry, tensors)
