"""The lead server of workers that change shared parameters themselves: it hands out shares, and keeps the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.trainers.central.hogwild import shape_of
from orchestray.trainers.central.machine import Entry, Machine
from orchestray.trainers.central.orders import compute_to_row
from orchestray.trainers.central.partition import Slice
from orchestray.trainers.central.server import ShardServer
from orchestray.trainers.central.settings import MAX_AHEAD
from orchestray.trainers.central.shared_values import SharedValues

if TYPE_CHECKING:
    from torch import nn

    from orchestray.trainers.central.buffers import Buffers
    from orchestray.trainers.optimizers import Optimizer
    from orchestray.trainers.replica.settings import ReplicaSettings


def share(settings: ReplicaSettings, model: nn.Module, optimizer: Optimizer, buffers: Buffers) -> SharedValues:
    """The memory of a run, which holds what the model does."""
    shared = SharedValues.create(shape_of(model, settings, optimizer, buffers))
    for view, parameter in zip(
        shared.views(shared.values), (p for p in model.parameters() if p.requires_grad), strict=True
    ):
        view.copy_(parameter.detach())
    shared.buffers.floats.copy_(buffers.floats)
    shared.buffers.integers.copy_(buffers.integers)
    return shared


def share_state(shared: SharedValues, optimizer: Optimizer, slices: Sequence[Slice]) -> None:
    """Put the state of the server's optimizer there too."""
    shared.share_state(optimizer, [f"{piece.name}:{piece.start}" for piece in slices], fill=True)


class OrderingMachine(Machine):
    """Answers a `next` with several orders, where it asks for `more`."""

    def apply(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        answer = super().apply(entry, tensors)
        order, num_more = answer.get("order"), int(entry.get("next", {}).get("more", 0))
        if order is None or order["kind"] != "compute":
            return answer
        more = self.lead.next_shares(int(entry["worker"]), min(num_more, self._fair_part()))
        answer["more"] = [compute_to_row(following) for following in more]
        return answer

    def _fair_part(self) -> int:
        """So many of the shares left before everybody stops may go to one worker: half of its even part of them.

        The others are to have something to do until the end (Hummel, Schonberg and Flynn 1992, "Factoring").
        """
        ledger, plan = self.lead, self.lead.settings
        most = 2 * MAX_AHEAD * len(ledger.workers) // ledger.num_shares + 1
        step, last = ledger.begun_step, min(plan.last_step, ledger.begun_step + most)
        while step < last and not (plan.validates_after(step, False) or plan.saves_after(step, False)):
            step += 1
        return (step - ledger.begun_step) * ledger.num_shares // (2 * len(ledger.workers))


class LedgerServer(ShardServer):
    """Serves orders. What a worker that is gone had begun is in its journal in the memory: those shares are done."""

    def __init__(self, machine: Machine, shared: SharedValues) -> None:
        super().__init__(machine)
        self._shared = shared

    def _apply(self, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        worker = int(entry.get("worker", -1))
        if "leave" in entry:
            self._shared.expel(worker)
        if "leave" in entry or "hello" in entry:
            begun = self._shared.left_by(worker)
            if begun:
                super()._apply({"worker": worker, "acknowledge": begun}, ())
        return super()._apply(entry, tensors)
