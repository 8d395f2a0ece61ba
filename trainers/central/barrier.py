"""What everybody stops for: validations, checkpoints, the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestray.trainers.central.orders import Deposit, Finish, Order, Save, Validate, Wait
from orchestray.trainers.central.plan import LedgerSettings


@dataclass
class _Part:
    """Of a validation."""

    order: Validate
    holder: int | None = None
    sums: dict[str, float] | None = None
    """None: not reported yet."""


@dataclass
class _Saving:
    order: Save
    holder: int | None


@dataclass
class _Depositing:
    """Of one worker, before the checkpoint that is due."""

    order: Deposit
    is_done: bool = False


@dataclass(frozen=True)
class _Stop:
    reason: str
    step: int
    """After which the run ends."""
    validate: bool


class Barrier:
    """What is due after a step, in this order: its validation, its checkpoint, the end. Between them nobody trains.

    Where workers keep something that a checkpoint is to have, it is saved once all who are there have deposited that.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self.validation: dict[str, float] | None = None
        """What the last one said."""
        self._validated_step = self._saved_step = settings.start_step
        self._parts: list[_Part] = []
        self._deposits: dict[int, _Depositing] = {}
        self._saving: _Saving | None = None
        self._stop: _Stop | None = None

    def is_open_after(self, step: int) -> bool:
        """Whether the next batch may begin once `step` has: nothing is due after it."""
        return step < self._last_step and not self._validates(step) and not self._saves(step)

    def next(self, worker: int, step: int, workers: Collection[int], new_id: Callable[[], int]) -> Order:
        """What a worker, one of `workers`, does for what is due after `step`, which is complete."""
        if self._validates(step):
            return self._next_part(worker, step, len(workers), new_id)
        if self._saves(step):
            if self._settings.deposits and (order := self._next_deposit(worker, step, workers, new_id)) is not None:
                return order
            if self._saving is None:
                self._saving = _Saving(Save(new_id(), step), None)
            if self._saving.holder is not None:
                return Wait(drain=self._saving.holder == worker)
            self._saving.holder = worker
            return self._saving.order
        finish = self.finish(step)
        assert finish is not None  # else the next batch may begin
        return finish

    def _next_part(self, worker: int, step: int, num_workers: int, new_id: Callable[[], int]) -> Order:
        if not self._parts:
            num_parts = min(num_workers, max(1, self._settings.num_validation_samples))
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
        """None: all have deposited."""
        deposits = self._deposits
        if worker not in deposits:
            deposits[worker] = _Depositing(Deposit(new_id(), step))
            return deposits[worker].order
        if not deposits[worker].is_done:
            return Wait(drain=True)
        return None if all(one in deposits and deposits[one].is_done for one in workers) else Wait()

    def deposited(self, worker: int, order_id: int) -> bool:
        """The servers have a copy of what a worker keeps."""
        depositing = self._deposits.get(worker)
        if depositing is None or depositing.order.order_id != order_id:
            return False
        depositing.is_done = True
        return True

    def validated(self, worker: int, order_id: int, sums: Mapping[str, float]) -> dict[str, float] | None:
        """A part is done; returns the means when all are."""
        for part in self._parts:
            if part.order.order_id == order_id and part.holder == worker:
                part.holder, part.sums = None, dict(sums)
        told = [part.sums for part in self._parts if part.sums is not None]
        if not self._parts or len(told) < len(self._parts):
            return None
        names = dict.fromkeys(name for sums in told for name in sums)
        count = self._settings.num_validation_samples
        self.validation = {name: sum(sums.get(name, 0.0) for sums in told) / count for name in names}
        self._validated_step = self._parts[0].order.step
        self._parts = []
        return self.validation

    def saved(self, worker: int, order_id: int) -> bool:
        """The checkpoint is written."""
        saving = self._saving
        if saving is None or saving.order.order_id != order_id or saving.holder != worker:
            return False
        self._saved_step, self._saving = saving.order.step, None
        self._deposits.clear()
        return True

    def leave(self, worker: int) -> None:
        """What a worker had to do goes to somebody else."""
        self._deposits.pop(worker, None)
        for part in self._parts:
            part.holder = None if part.holder == worker else part.holder
        if self._saving is not None and self._saving.holder == worker:
            self._saving.holder = None

    def lost(self, worker: int, holding: Collection[int]) -> Order | None:
        """An order that was given to a worker, which does not know of it."""
        mine: list[Validate | Save | Deposit] = [part.order for part in self._parts if part.holder == worker]
        if worker in self._deposits and not self._deposits[worker].is_done:
            mine.append(self._deposits[worker].order)
        if self._saving is not None and self._saving.holder == worker:
            mine.append(self._saving.order)
        return next((order for order in mine if order.order_id not in holding), None)

    def request_stop(self, reason: str, step: int, *, validate: bool) -> None:
        """End after `step`, the last that has begun."""
        if self._stop is None:
            self._stop = _Stop(reason, step, validate)

    def finish(self, step: int) -> Finish | None:
        """The end, if it is after `step` and nothing is due before it."""
        if step < self._last_step or self._validates(step) or self._saves(step):
            return None
        stop = self._stop
        if stop is None or (stop.reason == "interrupted" and stop.step >= self._settings.last_step):
            return Finish("finished")  # an interrupt that came too late cut nothing short
        return Finish(stop.reason)

    @property
    def _last_step(self) -> int:
        last = self._settings.last_step
        return last if self._stop is None else min(last, self._stop.step)

    def _validates(self, step: int) -> bool:
        stop = self._stop
        last = step == self._settings.last_step or (stop is not None and stop.validate and step == stop.step)
        return step > self._validated_step and self._settings.validates_after(step, last)

    def _saves(self, step: int) -> bool:
        return step > self._saved_step and self._settings.saves_after(step, step == self._last_step)

    def to_json(self) -> dict[str, Any]:
        return {
            "validation": self.validation,
            "validated_step": self._validated_step,
            "saved_step": self._saved_step,
            "parts": [asdict(part) for part in self._parts],
            "deposits": [[worker, asdict(one.order), one.is_done] for worker, one in self._deposits.items()],
            "saving": None if self._saving is None else asdict(self._saving),
            "stop": None if self._stop is None else asdict(self._stop),
        }

    @staticmethod
    def from_json(settings: LedgerSettings, value: Mapping[str, Any]) -> Barrier:
        barrier = Barrier(settings)
        barrier.validation = value["validation"]
        barrier._validated_step, barrier._saved_step = value["validated_step"], value["saved_step"]
        barrier._parts = [_Part(Validate(**part["order"]), part["holder"], part["sums"]) for part in value["parts"]]
        barrier._deposits = {
            worker: _Depositing(Deposit(**order), is_done) for worker, order, is_done in value["deposits"]
        }
        saving, stop = value["saving"], value["stop"]
        barrier._saving = None if saving is None else _Saving(Save(**saving["order"]), saving["holder"])
        barrier._stop = None if stop is None else _Stop(**stop)
        return barrier
