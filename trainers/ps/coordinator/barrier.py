"""The work between steps that all workers stop training for: validations, checkpoints and the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestray.trainers.config.goals import Best
from orchestray.trainers.ps.protocol.assignments import Deposit, Finish, Order, Save, Validate, Wait
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings


@dataclass
class _Part:
    """One part of a validation, which one worker computes."""

    order: Validate
    holder: int | None = None
    sums: dict[str, float] | None = None
    """Sums over the samples of the part; None until they are reported."""


@dataclass
class _Saving:
    order: Save
    holder: int | None


@dataclass
class _Depositing:
    """A deposit that one worker makes before the checkpoint that is due."""

    order: Deposit
    is_done: bool = False


@dataclass(frozen=True)
class _Stop:
    reason: str
    step: int
    """Step after which the run ends."""
    validate: bool


@dataclass(eq=False)
class Barrier:
    """A barrier after a step: its validation, its checkpoint and the end of the run, in this order.

    No worker trains until all of it is done. Where workers keep state that belongs in a checkpoint, the checkpoint is
    saved once all workers have deposited that state.
    """

    settings: CoordinatorSettings
    validated_step: int
    """Last step whose validation is done."""
    saved_step: int
    """Last step whose checkpoint is written."""
    best: Mapping[str, Any] | None
    """Best checkpoint so far; saved before any worker trains on."""
    validation: dict[str, float] | None = None
    """Means of the last validation."""
    _parts: list[_Part] = field(default_factory=list)
    _deposits: dict[int, _Depositing] = field(default_factory=dict)
    _saving: _Saving | None = None
    _stop: _Stop | None = None

    def due_after(self, step: int) -> Literal["validation", "checkpoint", "end"] | None:
        """Return what is due first after `step`; None: nothing, and the next batch may begin once `step` has begun."""
        plan, stop = self.settings, self._stop
        last = plan.last_step if stop is None else min(plan.last_step, stop.step)
        ends_validated = step == plan.last_step or (stop is not None and stop.validate and step == stop.step)
        if step > self.validated_step and plan.validates_after(step, ends_validated):
            return "validation"
        is_best = self.best is not None and self.best["step"] == step
        if step > self.saved_step and plan.saves_after(step, step == last, is_best=is_best):
            return "checkpoint"
        return "end" if step >= last else None

    def next(self, worker: int, step: int, workers: Collection[int], new_id: Callable[[], int]) -> Order:
        """Return the order of a worker for the work that is due after `step`, which is complete.

        Args:
            worker: one of `workers`.
            step: last step that has begun.
            workers: all present workers.
            new_id: returns an order id that is not in use.
        """
        due = self.due_after(step)
        if due == "validation":
            return self._next_part(worker, step, len(workers), new_id)
        if due == "checkpoint":
            if self.settings.deposits and (order := self._next_deposit(worker, step, workers, new_id)) is not None:
                return order
            if self._saving is None:
                self._saving = _Saving(Save(new_id(), step), None)
            if self._saving.holder is not None:
                return Wait(drain=self._saving.holder == worker)
            self._saving.holder = worker
            return self._saving.order
        return self.finish()

    def _next_part(self, worker: int, step: int, num_workers: int, new_id: Callable[[], int]) -> Order:
        if not self._parts:
            num_parts = min(num_workers, max(1, self.settings.num_validation_samples))
            self._parts = [_Part(Validate(new_id(), step, part, num_parts)) for part in range(num_parts)]
        if any(part.holder == worker for part in self._parts):
            return Wait(drain=True)
        for part in self._parts:
            if part.holder is None and part.sums is None:
                part.holder = worker
                return part.order
        return Wait()

    def _next_deposit(
        self, worker: int, step: int, workers: Collection[int], new_id: Callable[[], int]
    ) -> Order | None:
        """Return an order to deposit or to wait; None if all workers have deposited."""
        deposits = self._deposits
        if worker not in deposits:
            deposits[worker] = _Depositing(Deposit(new_id(), step))
            return deposits[worker].order
        if not deposits[worker].is_done:
            return Wait(drain=True)
        return None if all(one in deposits and deposits[one].is_done for one in workers) else Wait()

    def deposited(self, worker: int, order_id: int) -> bool:
        """Record that the servers have a copy of a worker's state; return False if the order is not the worker's."""
        depositing = self._deposits.get(worker)
        if depositing is None or depositing.order.order_id != order_id:
            return False
        depositing.is_done = True
        return True

    def validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        """Record the sums of one part of the validation; return the means once all parts are done."""
        for part in self._parts:
            if part.order.order_id == order_id and part.holder == worker:
                part.holder, part.sums = None, dict(sums)
        reported = [part.sums for part in self._parts if part.sums is not None]
        if not self._parts or len(reported) < len(self._parts):
            return None
        names = dict.fromkeys(name for sums in reported for name in sums)
        count = self.settings.num_validation_samples
        self.validation = {name: sum(sums.get(name, 0.0) for sums in reported) / count for name in names}
        self.validated_step = self._parts[0].order.step
        self._parts = []
        if self.settings.best is not None:
            metric, mode = self.settings.best
            self.best = Best(metric, mode).after(self.best, self.validated_step, self.validation)
        return self.validation

    def saved(self, worker: int, order_id: int) -> bool:
        """Record that the checkpoint is written; return False if the order is not the worker's."""
        saving = self._saving
        if saving is None or saving.order.order_id != order_id or saving.holder != worker:
            return False
        self.saved_step, self._saving = saving.order.step, None
        self._deposits.clear()
        return True

    def leave(self, worker: int) -> None:
        """Free what the worker had been ordered to do, so that another worker can take it."""
        self._deposits.pop(worker, None)
        for part in self._parts:
            part.holder = None if part.holder == worker else part.holder
        if self._saving is not None and self._saving.holder == worker:
            self._saving.holder = None

    def lost(self, worker: int, holding: Collection[int]) -> Order | None:
        """Return an order that was given to a worker and is not among those it holds, or None."""
        mine: list[Validate | Save | Deposit] = [part.order for part in self._parts if part.holder == worker]
        if worker in self._deposits and not self._deposits[worker].is_done:
            mine.append(self._deposits[worker].order)
        if self._saving is not None and self._saving.holder == worker:
            mine.append(self._saving.order)
        return next((order for order in mine if order.order_id not in holding), None)

    def request_stop(self, reason: str, step: int, *, validate: bool) -> None:
        """End the run after `step`, the last step that has begun. The first request counts."""
        if self._stop is None:
            self._stop = _Stop(reason, step, validate)

    def finish(self) -> Finish:
        """Return the end of the run, which is due."""
        stop = self._stop
        if stop is None or (stop.reason == "interrupted" and stop.step >= self.settings.last_step):
            return Finish("finished")  # the interrupt came too late to shorten the run
        return Finish(stop.reason)
